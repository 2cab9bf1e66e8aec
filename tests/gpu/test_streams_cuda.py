"""Models that compute on several streams, or on others from step to step, get plain torch's bits; skipped on a CPU."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap import api
from lmswap.errors import OptionError
from lmswap.runtime.streams import MULTIPLE_STREAMS
from tests.models import quick_of
from tools.emulated_gpu import machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),  # plain torch says so too
]
WIDTH, BATCH, NUM_STEPS = 128, 512, 6


@pytest.fixture(autouse=True)
def late():
    """What is queued runs late, so that what is not waited for is not there."""
    if machine.is_started():
        machine.configure(jitter_seconds=0.002)
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())
    if machine.is_started():
        machine.configure()


def chain(count):
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def through(layers, x):
    for layer in layers:
        x = torch.tanh(layer(x)).sin()
    return x


class Branches(nn.Module):
    """Two branches over ``shared``, one of them on a stream of its own; that of ``first`` is queued first."""

    def __init__(self, first: str, num_shared: int = 0, num_aside: int = 4) -> None:
        super().__init__()
        self.shared, self.main, self.side = chain(num_shared), chain(4), chain(num_aside)
        self.slow, self.first = nn.Linear(512, 512, bias=False), first
        self.stream = torch.cuda.Stream()

    def aside(self, x):
        with torch.cuda.stream(self.stream):
            with torch.no_grad():
                late = self.slow.weight
                for _ in range(3):
                    late = late @ self.slow.weight
            return through(self.side, x + late[0, 0])

    def forward(self, x):
        current = torch.cuda.current_stream()
        x = through(self.shared, x)
        self.stream.wait_stream(current)
        x.record_stream(self.stream)
        y = self.aside(x) if self.first == "side" else None
        z = through(self.main, x)
        y = self.aside(x) if y is None else y
        current.wait_stream(self.stream)
        y.record_stream(current)
        return y + z


class Dropped(Branches):
    """What the other stream reads, but does not save, is held by autograd alone by then."""

    def forward(self, x):
        current, out = torch.cuda.current_stream(), []
        for layer in self.main:
            x = torch.tanh(layer(x))
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream), torch.no_grad():
                late = self.slow.weight @ self.slow.weight
            with torch.cuda.stream(self.stream):
                out.append(torch.tanh(x * 2 + late[0, 0]))
            x = x + 1
        current.wait_stream(self.stream)
        for y in out:
            y.record_stream(current)
        return sum(out) + x


class Made(Branches):
    """What is saved belongs to another stream, which goes on."""

    def forward(self, x):
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        for layer in self.main:
            x = torch.tanh(layer(x))
            with torch.cuda.stream(self.stream), torch.no_grad():
                y = self.slow.weight @ self.slow.weight[:, :WIDTH]
            current.wait_stream(self.stream)
            x = x * y
        return x


class Elsewhere(torch.autograd.Function):
    """exp, whose gradient is computed on another stream; ``inside`` says where it takes what it has saved."""

    stream: torch.cuda.Stream
    inside: bool

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        current, stream = torch.cuda.current_stream(), Elsewhere.stream
        saved = None if Elsewhere.inside else ctx.saved_tensors
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            (y,) = saved or ctx.saved_tensors
            result = gradient * y
        current.wait_stream(stream)
        result.record_stream(current)
        return result


class BackwardElsewhere(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers, self.inside = chain(4), inside
        Elsewhere.stream = torch.cuda.Stream()

    def forward(self, x):
        Elsewhere.inside = self.inside
        for layer in self.layers:
            x = torch.tanh(Elsewhere.apply(torch.tanh(layer(x))) - 1)
        return x


class Checkpointed(Branches):
    def aside(self, x):
        with torch.cuda.stream(self.stream):
            return checkpoint(lambda x: through(self.side, x), x, use_reentrant=False)


class Submodule(nn.Module):
    """The branch aside is a module, which torch.compile captures although it leaves out who calls it."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = chain(3)

        def forward(self, x):
            return through(self.layers, x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.main, self.side = self.Branch(), self.Branch(), self.Branch()
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        current = torch.cuda.current_stream()
        x = self.first(x)
        self.stream.wait_stream(current)
        x.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            y = self.side(x)
        z = self.main(x)
        current.wait_stream(self.stream)
        y.record_stream(current)
        return y + z


MODELS = {
    "side_first": lambda: Branches("side"),
    "one_layer_aside": lambda: Branches("side", num_aside=1),
    "main_first": lambda: Branches("main"),
    "shared_input": lambda: Branches("side", num_shared=2),
    "dropped": lambda: Dropped("side"),
    "made_elsewhere": lambda: Made("side"),
    "backward_elsewhere": lambda: BackwardElsewhere(inside=False),
    "backward_elsewhere_inside": lambda: BackwardElsewhere(inside=True),
    "checkpointed": lambda: Checkpointed("side", num_shared=2),
    "submodule": Submodule,
}


def one_stream():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).cuda()


def steps(model, *, streams=(None,), forwards=1, backward_on=None, backwards=1):
    """The gradients of some steps; the forwards are called on ``streams`` by turns, each with some ``backwards``."""
    torch.manual_seed(1)
    x = torch.randn(BATCH, WIDTH, device="cuda")
    torch.cuda.synchronize()
    results, turns = [], itertools.cycle(stream or torch.cuda.default_stream() for stream in streams)
    for _ in range(NUM_STEPS):
        losses = []
        for stream in itertools.islice(turns, forwards):
            torch.cuda.set_stream(stream)
            losses.append(model(x).square().mean())
        for loss, number in itertools.product(losses, range(backwards)):
            with torch.cuda.stream(backward_on):
                loss.backward(retain_graph=number < backwards - 1)
        torch.cuda.synchronize()  # gradients may be added up on another stream in the next step
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        del losses, loss
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is given up is what the next ones get
    return results


def enabled(model, compiler="eager", **options):
    torch.compiler.reset()
    options = {"budget": "1GiB", "policy": "swap_all", "min_swap_bytes": 4096, **options}
    return lmswap.enable(model, compiler=compiler, **options)


def report_of(model, compiler="eager", *, verify=False, **how):
    """What is reported of steps whose gradients were plain torch's."""
    expected = steps(model, **how)
    enabled(model, compiler, verify=verify)
    actual = steps(model, **how)
    report = lmswap.report(model)
    lmswap.disable(model)
    assert len(actual) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert report.swapped_out_bytes > 0
    assert report.tier_used_bytes == 0
    return report


@pytest.mark.parametrize(
    ("name", "compiler"),
    quick_of(
        itertools.product(MODELS, ["eager", "fx"]),
        [("shared_input", "fx"), ("side_first", "eager"), ("backward_elsewhere", "fx")],
    ),
)
def test_a_model_that_computes_on_several_streams_gets_plain_torchs_bits(name, compiler):
    torch.manual_seed(0)
    notes = report_of(MODELS[name]().cuda(), compiler).notes
    if compiler == "eager":
        assert notes.count(MULTIPLE_STREAMS) == ("elsewhere" not in name)


@pytest.mark.parametrize(
    "name", quick_of(["side_first", "shared_input", "backward_elsewhere_inside"], ["backward_elsewhere_inside"])
)
def test_tensors_saved_on_several_streams_are_verified(name):
    torch.manual_seed(0)
    assert report_of(MODELS[name]().cuda(), verify=True).verified.num_saved > 0


@pytest.mark.parametrize(
    ("num_streams", "compiler"), quick_of(itertools.product([1, 2], ["eager", "fx"]), [(1, "eager"), (2, "fx")])
)
def test_a_model_may_be_called_on_any_stream_and_on_others_by_turns(num_streams, compiler):
    streams = [torch.cuda.Stream(), None][:num_streams]
    assert MULTIPLE_STREAMS not in report_of(one_stream(), compiler, streams=streams).notes


@pytest.mark.parametrize(
    ("compiler", "backwards"), quick_of(itertools.product(["eager", "fx"], [1, 2]), [("eager", 1), ("fx", 2)])
)
def test_backwards_may_be_called_on_another_stream(compiler, backwards):
    how = {"backward_on": torch.cuda.Stream(), "backwards": backwards}
    assert MULTIPLE_STREAMS not in report_of(one_stream(), compiler, **how).notes


@pytest.mark.parametrize("compiler", quick_of(["eager", "fx"], ["fx"]))
def test_forwards_on_two_streams_may_wait_for_their_backwards_together(compiler):
    report_of(one_stream(), compiler, streams=(None, torch.cuda.Stream()), forwards=2)


class Both(Branches):
    """Each branch saves what comes before them, 64 wide."""

    def __init__(self) -> None:
        super().__init__("side")
        self.before, self.main[0], self.side[0] = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(64, WIDTH)

    def aside(self, x):
        with torch.cuda.stream(self.stream):
            return through(self.side, x)

    def forward(self, x):
        return super().forward(torch.tanh(self.before(x)))


def test_only_tensors_saved_by_a_single_stream_are_swapped():
    torch.manual_seed(0)
    model, x = enabled(Both().cuda()), torch.ones(BATCH, WIDTH, device="cuda")
    for _ in range(3):
        model(x).sum().backward()
    step = api._sessions[model].plans.newest()
    sizes = {buffer.id: buffer.nbytes for buffer in step.merged.program.buffers}
    swapped = {swap.buffer for swap in step.plan.swaps}
    assert {sizes[number] for number in swapped} == {BATCH * WIDTH * 4}
    assert {sizes[number] for number in sizes.keys() - swapped} >= {BATCH * 64 * 4}
    assert len(swapped) > len(sizes) / 2
    lmswap.disable(model)


def test_models_that_name_streams_use_hooks_which_the_report_states():
    torch.manual_seed(0)
    refused, path, *_ = report_of(Branches("side").cuda(), "fx").notes
    assert "the model's code uses CUDA streams or events: graphs keep no order between streams" in refused
    assert path.startswith("path: saved-tensor hooks for the whole model")


def test_an_arena_follows_the_model_to_another_stream():
    model, x = enabled(one_stream(), "fx"), torch.ones(BATCH * 8, WIDTH, device="cuda")

    def step():
        model(x).sum().backward()
        model.zero_grad()

    for _ in range(NUM_STEPS):
        step()
    arena = api._sessions[model].engine.arena
    before, stream = arena.reserved_bytes, torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    (segment,) = (s for s in arena._segments() if s["address"] == arena._base)
    assert segment["stream"] == stream.cuda_stream
    assert arena.reserved_bytes == before
    assert arena.num_unplaced == 0
    lmswap.disable(model)


@pytest.mark.parametrize("compiler", ["eager", "fx"])
def test_a_call_within_a_capture_is_refused_before_anything_runs(compiler, monkeypatch):
    model, x = enabled(one_stream(), compiler), torch.ones(BATCH, WIDTH, device="cuda")
    ran = []
    model[0].register_forward_hook(lambda *_: ran.append(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(OptionError, match="Sequential was called while a CUDA graph is captured"):
        model(x)
    assert not ran
    monkeypatch.undo()
    model(x).sum().backward()
    lmswap.disable(model)
