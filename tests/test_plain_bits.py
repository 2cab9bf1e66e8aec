"""An enabled model gives the bits of plain torch: outputs, gradients and their strides, buffers, random state."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lmswap
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from tests.models import quick_of

RATES = (0.1, 0.15, 0.3, 0.45, 0.5, 0.9)


class Called(nn.Module):
    """A function behind a linear layer, so that it trains."""

    def __init__(self, function, width):
        super().__init__()
        self.layer, self.function = nn.Linear(width, width), function

    def forward(self, x):
        return self.function(self.layer(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.layer(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.15 if self.training else 0.0, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def mask_of_its_own(x):
    mask = torch.empty_like(x).bernoulli_(0.4)
    return x.view(-1) * mask.view(-1) + mask.sum()


class Heads(nn.Module):
    """Two heads, of which the losses here read only the first."""

    def __init__(self):
        super().__init__()
        self.stem, self.read, self.unread = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        hidden = self.stem(x).relu()
        return self.read(hidden), self.unread(hidden)


def layers(*makers):
    return lambda: nn.Sequential(*(make() for make in makers))


def conv(sides):
    return {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[sides]


def norm_cases():
    image = {1: (4, 3, 12), 2: (4, 3, 10, 10), 3: (2, 3, 6, 6, 6)}
    for sides, shape in image.items():
        norms = {
            "batch": getattr(nn, f"BatchNorm{sides}d"),
            "instance": getattr(nn, f"InstanceNorm{sides}d"),
            "group": lambda channels: nn.GroupNorm(2, channels),
        }
        for name, norm in norms.items():
            make = layers(
                lambda sides=sides: conv(sides)(3, 8, 3, padding=1),
                lambda norm=norm: norm(8),
                nn.ReLU,
                lambda sides=sides: conv(sides)(8, 4, 1),
                lambda norm=norm: norm(4),
            )
            yield f"{name} norm, {sides + 2} dims", make, shape
    yield "batch norm, 2 dims", layers(lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), nn.ReLU), (6, 8)
    yield "layer norm", layers(lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8)), (3, 5, 8)


def dropout_cases():
    for rate in RATES:
        yield f"dropout {rate}", layers(lambda: nn.Linear(32, 48), lambda p=rate: nn.Dropout(p), nn.GELU), (16, 32)
    for kind, shape in (("Dropout1d", (4, 6, 8)), ("Dropout2d", (2, 6, 5, 8)), ("Dropout3d", (2, 6, 3, 4, 8))):
        yield kind, lambda kind=kind: Called(getattr(nn, kind)(0.15), 8), shape
    for kind in ("AlphaDropout", "FeatureAlphaDropout"):
        yield kind, lambda kind=kind: Called(getattr(nn, kind)(0.15), 8), (4, 6, 8)
    yield "dropout in place", lambda: Called(lambda x: F.dropout(x * 2, 0.15, inplace=True), 8), (16, 8)
    yield "dropout, transposed", lambda: Called(lambda x: F.dropout(x.transpose(0, 1) * 2, 0.15), 8), (5, 7, 8)
    yield "bernoulli", lambda: Called(lambda x: x * torch.bernoulli(x.detach().mT, 0.3).mT, 8), (5, 7, 8)
    yield "bernoulli in place, viewed", lambda: Called(mask_of_its_own, 8), (16, 8)
    yield "attention", Attention, (2, 16, 32)
    for is_batch_first in (False, True):
        make = lambda first=is_batch_first: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.15, batch_first=first)  # noqa: E731
        yield f"encoder layer, batch first: {is_batch_first}", make, (2, 16, 32)


def function_cases():
    classes = torch.tensor([1, 0, 3, 7, 2])
    marks = torch.tensor([[1, 3, -1, 0, 0, 0, 0, 0]] * 5)
    functions = {
        "multi_margin_loss": lambda x: F.multi_margin_loss(x, classes.to(x.device)),
        "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, marks.to(x.device)),
        "pinv": lambda x: torch.linalg.pinv(x[:, :3]),
        "mT": lambda x: (x.unsqueeze(0) * 0.9).mT,
        "movedim": lambda x: (x.unsqueeze(0) * 0.9).movedim(0, 2),
        "transpose_copy": lambda x: torch.transpose_copy(x, 0, 1),
        "unfold": lambda x: (x * 0.9).unfold(1, 3, 1),
        "as_strided_scatter": lambda x: torch.as_strided_scatter(x * 0.9, x[:2, :2] * 2, (2, 2), (1, 2)),
        "softshrink": lambda x: F.softshrink(x, 0.1),
        "hardshrink": lambda x: F.hardshrink(x, 0.1),
        "matmul": lambda x: x.expand(3, 5, 8) @ x.t(),
        "addcdiv": lambda x: torch.addcdiv(x, x * 0.7, x.exp(), value=3.14),
        "addcdiv_": lambda x: (x * 0.9).addcdiv_(x * 0.7, x.exp(), value=3.14),
        "addcmul_": lambda x: (x * 0.9).addcmul_(x * 0.7, x.exp(), value=3.14),
        "add_": lambda x: (x * 0.9).add_(x.exp(), alpha=0.3),
        "interpolate": lambda x: F.interpolate(x.view(1, 1, 5, 8), scale_factor=2, mode="bicubic"),
    }
    for name, function in functions.items():
        yield name, lambda function=function: Called(function, 8), (5, 8)


def losses(name):
    return {
        "sum": lambda y: y.sum(),  # its gradient has strides of 0
        "square": lambda y: y.float().square().mean(),
        "contiguous": lambda y: (y.contiguous() * torch.linspace(0.1, 1, y.numel()).view(y.shape)).sum(),
    }[name]


def train(make, shape, loss, *, is_enabled, autocast=False, is_training=True, memory_format=torch.contiguous_format):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make().train(is_training)
    if memory_format is not torch.contiguous_format:
        model = model.to(memory_format=memory_format)
    if is_enabled:
        lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
    results = []
    for _ in range(2):
        x = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            output = model(x)
        output = output[0] if isinstance(output, tuple) else output
        loss(output).backward()
        results += [output.detach(), x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]
        model.zero_grad()
    results += [value.clone() for value in model.state_dict().values()]
    if is_enabled:
        assert lmswap.program(model).ops
        lmswap.disable(model)
    return results


def check(make, shape, loss, **how):
    expected = train(make, shape, loss, is_enabled=False, **how)
    actual = train(make, shape, loss, is_enabled=True, **how)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def named(cases, *, quick=""):
    """As a test's parameters; those in whose names ``quick`` is run on each change, the others in `make test-all`."""
    return [
        pytest.param(make, shape, id=name, marks=[pytest.mark.slow] * (quick not in name))
        for name, make, shape in cases
    ]


LOSSES = ("sum", "square", "contiguous")


@pytest.mark.parametrize("autocast", quick_of([False, True], [False]))
@pytest.mark.parametrize(("make", "shape"), named(dropout_cases()))
def test_dropout(make, shape, autocast):
    check(make, shape, losses("square"), autocast=autocast)


@pytest.mark.parametrize("loss", quick_of(LOSSES, ["square"]))
@pytest.mark.parametrize(("make", "shape"), named(norm_cases(), quick="4 dims"))
def test_norms(make, shape, loss):
    check(make, shape, losses(loss))


@pytest.mark.parametrize(("make", "shape"), named(norm_cases(), quick="5 dims"))
def test_norms_in_evaluation_mode(make, shape):
    check(make, shape, losses("contiguous"), is_training=False)


@pytest.mark.parametrize("loss", quick_of(LOSSES, ["sum"]))
@pytest.mark.parametrize(("make", "shape"), named(case for case in norm_cases() if len(case[2]) == 4))
def test_norms_of_channels_last_images(make, shape, loss):
    check(make, shape, losses(loss), memory_format=torch.channels_last)


@pytest.mark.parametrize("loss", quick_of(["sum", "contiguous"], ["contiguous"]))
@pytest.mark.parametrize(("make", "shape"), named(function_cases()))
def test_functions(make, shape, loss):
    check(make, shape, losses(loss))


class Tokens(nn.Module):
    """Gives one image, of tokens, in a layout of ``view``."""

    def __init__(self, view):
        super().__init__()
        self.layer, self.view = nn.Linear(16, 16), view

    def forward(self, tokens):
        return self.view(self.layer(tokens))


VIEWS = {
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "movedim": lambda x: x.movedim(-1, 1),
    "slice": lambda x: x.permute(0, 3, 1, 2)[:, :, 1:, 1:],
    "as_strided": lambda x: x.as_strided((1, 16, 6, 6), (999, 1, 96, 16)),
    "complex": lambda x: torch.complex(x, x.tanh()).permute(0, 3, 1, 2),
}


def results_with_a_layer_behind(view, layer, use):
    """What ``layer`` makes of what ``use`` makes of the output of a model, in plain torch and with lmswap."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Tokens(view), torch.randn(1, 6, 6, 16, requires_grad=True)
    trained, results = (x, *model.parameters(), *layer.parameters()), []
    for is_enabled in (False, True):
        if is_enabled:
            lmswap.enable(model, policy="swap_all", budget="2GiB", min_swap_bytes=1)
        output = model(x)
        layer(use(output)).square().mean().backward()
        results.append([output.detach(), *(leaf.grad for leaf in trained)])
        for leaf in trained:
            leaf.grad = None
    lmswap.disable(model)
    return results


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_layer_behind_the_model_finds_its_output_as_in_plain_torch(view, groups):
    layer = nn.Conv2d(16, 16, 3, groups=groups)
    results = results_with_a_layer_behind(view, layer, lambda y: y.real + y.imag if y.is_complex() else y)
    assert all(map(torch.equal, *results))
    assert [one.stride() for one in results[0]] == [one.stride() for one in results[1]]


def test_an_output_that_is_a_view_can_be_written_in_place():
    results = results_with_a_layer_behind(VIEWS["permute"], nn.Conv2d(16, 16, 3), lambda y: y.mul_(0.5))
    assert all(map(torch.equal, *results))


def test_outputs_that_no_loss_reads_have_no_gradient():
    check(Heads, (4, 16), losses("sum"))


def test_a_report_names_operators_that_may_differ_from_plain_torch_once():
    torch.compiler.reset()
    model = lmswap.enable(Called(lambda x: x.prod(-1) + x.sigmoid().prod(-1), 8), budget="2GiB")
    model(torch.randn(5, 8)).sum().backward()
    assert len([note for note in lmswap.report(model).notes if "aten.prod" in note]) == 1
    lmswap.disable(model)


class Breaks(nn.Module):
    """``h`` is used by a graph of its own after one that uses it twice: that one's two are summed first."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        y = torch.tanh(self.a(h)) + torch.tanh(self.b(h))
        torch._dynamo.graph_break()
        return y + torch.tanh(self.c(h))


def test_several_graphs_that_sum_gradients_in_another_order_are_reported():
    torch.compiler.reset()
    found = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        model, x = Breaks(), torch.randn(32, 64)
        if is_enabled:
            lmswap.enable(model, policy="swap_all", min_swap_bytes=1)
        model(x).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    rounded = [note for note in lmswap.report(model).notes if note.startswith(ROUNDED_OTHERWISE)]
    lmswap.disable(model)
    assert not all(map(torch.equal, *found))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))
    assert any("summed graph by graph" in note for note in rounded)
