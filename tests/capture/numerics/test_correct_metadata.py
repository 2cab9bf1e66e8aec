"""Tensors of captured graphs have the strides and dtypes that operators really make, also where torch traces others."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

import lmswap
from lmswap.capture.aot import boxed, compile_region
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.errors import TransferError
from lmswap.runtime import ops
from tests.capture.captured import Recording
from tests.cases import cases


class Comparing(Recording):
    """Runs the graphs node by node, and records the tensors that differ from their fakes."""

    def __init__(self, *, corrects: bool = True) -> None:
        super().__init__()
        self.corrects, self.wrong, self.num_tensors = corrects, [], 0

    def output_metadata(self, node):
        return super().output_metadata(node) if self.corrects else None

    def compiled(self, module, phase):
        def run(arguments):
            return tuple(_Nodes(module, self).run(*arguments))

        return boxed(run)


class _Nodes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, found: Comparing) -> None:
        super().__init__(module)
        self._found = found

    def run_node(self, n):
        value = super().run_node(n)
        if n.op == "call_function":
            for real, fake in zip(pytree.tree_leaves(value), pytree.tree_leaves(n.meta.get("val")), strict=True):
                if isinstance(real, torch.Tensor):
                    self._found.num_tensors += 1
                    if _geometry(real) != _geometry(fake):
                        self._found.wrong.append((n.format_node(), _geometry(real), _geometry(fake)))
        return value


def _geometry(tensor: torch.Tensor) -> object:
    lies = tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.shape, lies if tensor.numel() else ()


def train(model, example: torch.Tensor, **how) -> Comparing:
    torch.compiler.reset()
    found = Comparing(**how)
    compiled = torch.compile(model, backend=lambda m, i: compile_region(m, i, found), dynamic=False)
    output = compiled(example.requires_grad_())
    # As torch guesses that it will lie: the backward of one that comes otherwise makes tensors that lie otherwise.
    output.backward(torch.empty_strided(output.shape, output.stride(), dtype=output.dtype).fill_(0.5))
    return found


class Depthwise(nn.Module):
    """torch traces the convolution's result as channels_last, as its input is; its CPU kernel makes it contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(64, 64, 3, padding=1, groups=64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        image = tokens.transpose(1, 2).view(1, 64, 14, 14)
        return torch.tanh(torch.tanh(self.convolution(image) + image) * 2.0)


class MixedNorm(nn.Module):
    """torch traces the statistics of a bfloat16 norm with float32 weights as bfloat16; its CPU kernel makes float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


class Bags(nn.Module):
    """torch traces an index of the bags that its kernel leaves empty for bfloat16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 8, mode="sum").to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = (x.detach() > 0).long().flatten()
        return self.bags(indices, torch.arange(0, 128, 16)) * x.sum()


class CopiedInto(nn.Module):
    """torch traces the copy into a part of a tensor as all of a storage; it is the same part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        rows, columns = y * 2, y * 3
        rows[2:] = y[:6].exp()
        columns[:, 4] = y[:, 5].exp()
        return torch.tanh(rows + columns)


CASES = {Depthwise: (1, 196, 64), MixedNorm: (8, 16), Bags: (8, 16), CopiedInto: (8, 16)}


@pytest.mark.parametrize("model", CASES)
def test_metadata_that_torch_traces_incorrectly_is_corrected(model):
    example = torch.randn(CASES[model])
    assert train(model(), example, corrects=False).wrong
    found = train(model(), example)
    assert found.num_tensors > 0
    assert not found.wrong


@pytest.mark.parametrize("model", CASES)
def test_corrected_tensors_are_swapped_with_plain_bits(model):
    torch.manual_seed(0)
    example, gradients = torch.randn(CASES[model]), []
    for policy in ("none", "swap_all"):
        torch.manual_seed(0)
        torch.compiler.reset()
        enabled = lmswap.enable(model(), "4GiB", policy=policy, min_swap_bytes=1)
        enabled(example).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in enabled.parameters()])
        assert policy == "none" or lmswap.report(enabled).swapped_out_bytes > 0
        lmswap.disable(enabled)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_storage_offsets_unlike_the_trace_are_named_and_not_swapped():
    with pytest.raises(TransferError, match=r"\[6\] that begins at element 2 of its storage, where torch traced 0"):
        ops.swap_out_start(torch.zeros(8)[2:], 1, 0, "host", 0, 0, torch.float32, [6], [1])


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Depthwise, r'made strides .* where torch traced .*compiler="eager"'),
        (MixedNorm, r"made torch.float32 of shape \[8, 1\] where torch traced torch.bfloat16"),
        (Bags, r"made a tensor of shape \[0\] where torch traced \[128\]"),
    ],
)
def test_layouts_unlike_the_trace_are_named_and_not_swapped(model, sentence, monkeypatch):
    monkeypatch.setattr(OpProfiler, "output_metadata", lambda *_: None)
    enabled = lmswap.enable(model(), "4GiB", policy="swap_all", min_swap_bytes=1)
    with pytest.raises(TransferError, match=sentence):
        enabled(torch.randn(CASES[model]))
    lmswap.disable(enabled)


class Normalized(nn.Module):
    """torch traces a channels_last image, which group norm takes; it is given strides of which it takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.GroupNorm(4, 16), nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(tokens.transpose(1, 2).view(1, 16, 3, 3, 3)))


def test_a_graph_that_could_not_run_is_replaced_by_hooks_and_reported():
    model, tokens = Normalized(), torch.randn(1, 27, 16)
    with pytest.raises(RuntimeError, match="is_contiguous"):  # torch's own graphs of this model do not run
        torch.compile(model, backend="aot_eager")(tokens)
    model(tokens).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    lmswap.enable(model, "4GiB", policy="swap", min_swap_bytes=1)
    for _ in range(2):
        model.zero_grad()
        model(tokens).square().sum().backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))
    assert "op 'native_group_norm' (" in " ".join(lmswap.report(model).notes)
    lmswap.disable(model)


LAYERS = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "depthwise": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "replication": lambda: nn.ReplicationPad2d(1),
    "reflection": lambda: nn.ReflectionPad2d(1),
    "max pool": lambda: nn.MaxPool2d(3, 1, 1),
    "average pool": lambda: nn.AvgPool2d(3, 1, 1),
    "shuffle": lambda: nn.ChannelShuffle(2),
    "softmax": lambda: nn.LogSoftmax(1),
    "upsample": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "unpool": lambda: Function(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "transpose": lambda: Function(lambda x: x.transpose(2, 3)),
    "last": lambda: Function(lambda x: x.contiguous(memory_format=torch.channels_last)),
    "mean": lambda: Function(lambda x: x - x.mean((2, 3), keepdim=True)),
}


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@cases(25)
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    shape=st.sampled_from([(2, 8, 4, 4), (1, 8, 4, 4)]),
    order=st.permutations(range(4)),
)
@example(names=["last", "transpose"], shape=(1, 8, 4, 4), order=[0, 1, 2, 3])
def test_every_tensor_of_random_networks_matches_the_metadata_of_its_graph(names, shape, order):
    example = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])
    assert not train(nn.Sequential(*(LAYERS[name]() for name in names)), example).wrong
