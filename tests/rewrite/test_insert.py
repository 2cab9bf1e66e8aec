import functools
import random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lmswap.capture.aot import GraphHandler, compile_region
from lmswap.capture.lower import lower
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.schedule import schedule
from lmswap.rewrite.insert import insert_swaps
from lmswap.runtime import ops
from lmswap.runtime.codegen import compile_boxed, without_backward
from tests.capture.captured import METER
from tests.models import CASES, Case, quick_of
from tests.rewrite.memory_engine import MemoryEngine
from tests.rewrite.random_plans import random_plan


class RandomlySwapped(GraphHandler):
    """A graph handler that rewrites every graph by a random plan; share 0 leaves them as they are."""

    output_metadata = METER.output_metadata

    def __init__(self, seed: int, share: float) -> None:
        self.rng, self.share, self.engine = random.Random(seed), share, MemoryEngine()

    def note(self, text):
        pass

    def edit(self, graphs, parameters):
        self._rewrite(lower(graphs, parameters=parameters, name="t"))

    def compiled(self, module, phase):
        return compile_boxed(module)

    def _rewrite(self, lowered):
        plan = random_plan(lowered.program, self.rng, share=self.share)
        insert_swaps(schedule(lowered.program, ()), lowered.graphs, plan, engine=self.engine.number)


def train(case: Case, share: float, seed: int, num_steps: int = 2):
    """Losses and gradients of a few steps of ``case`` under a random plan."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make()
    handler = RandomlySwapped(seed, share)
    model.compile(backend=lambda module, inputs: compile_region(module, inputs, handler), dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for _ in range(num_steps):
        loss = case.loss(model(case.batch()))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        results.append(case.loss(model(case.batch())))
    return results, handler.engine


@functools.cache
def unswapped(name: str):
    return train(CASES[name], 0.0, 0)[0]


@pytest.mark.parametrize(
    ("name", "seed"),
    quick_of(
        ((name, seed) for name in CASES for seed in range(1 if name == "unet3d" else 2)),
        [("encoder", 0), ("shared_views", 0)],
    ),
)
def test_any_valid_plan_is_bitwise_identical_to_no_plan(name, seed):
    expected = unswapped(name)
    actual, engine = train(CASES[name], 0.8, seed)
    assert engine.num_out > 10 and engine.num_in > 10
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


class PartReadLate(torch.nn.Module):
    """Its backward reads all of what `exp` made, much else, and then a part of it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        y = (x * self.weight).exp()
        part = y[:, :7].sin()
        for _ in range(6):
            part = part.tanh().cos()
        return y.cos().sum() + part.sum()


def test_tensors_that_no_op_reads_are_not_saved():
    rows, rewritten = torch.randn(4, 16), []

    class Kept(RandomlySwapped):
        def _rewrite(self, lowered):
            super()._rewrite(lowered)
            rewritten.append([graph.module.graph for graph in lowered.graphs])

    for seed in range(6):
        torch.compiler.reset()
        model, handler = PartReadLate(), Kept(seed, 0.8)
        expected = torch.autograd.grad(model(rows), model.parameters())
        model.compile(backend=functools.partial(compile_region, handler=handler), dynamic=False)
        assert all(map(torch.equal, torch.autograd.grad(model(rows), model.parameters()), expected))
    assert len(rewritten) == 6
    for _, backward in rewritten:  # which would hold it to its end
        assert all(node.users for node in backward.find_nodes(op="placeholder"))


class Watching(MemoryEngine):
    """Which sees whose memory is still held when something is swapped in."""

    def __init__(self):
        super().__init__()
        self.released, self.num_held = [], []

    def out_done(self, token, x):
        super().out_done(token, x)
        self.released.append(StorageWeakRef(x.untyped_storage()))

    def in_start(self, token, buffer, device):
        self.num_held.append(sum(not storage.expired() for storage in self.released))
        return super().in_start(token, buffer, device)


def test_a_backward_waits_for_its_forwards_copies_and_frees_their_memory():
    rows = torch.randn(4, 16)

    class Late(RandomlySwapped):
        def _rewrite(self, lowered):
            forward, backward = lowered.program.segments
            swaps = []
            for buffer in lowered.program.buffers:
                uses = [op.index for op in lowered.program.ops if buffer.id in (*op.reads, *op.writes)]
                here, there = ([use for use in uses if part.start <= use < part.stop] for part in (forward, backward))
                if buffer.is_swappable and here and there and there[0] > backward.start + 1:
                    release = backward.start + 1
                    swaps.append(Swap(buffer.id, "disk", 0, here[-1] + 1, release, there[0], there[0]))
            swaps.sort(key=lambda swap: swap.first_use)
            plan = Plan("late", 2**62, tuple(swaps), 0.0, 0, {"disk": 2**20})
            insert_swaps(schedule(lowered.program, ()), lowered.graphs, plan, engine=self.engine.number)
            self.num_swaps = len(swaps)
            self.graphs = [graph.module.graph for graph in lowered.graphs]

    model, handler = PartReadLate(), Late(0, 1.0)
    handler.engine = Watching()
    expected = torch.autograd.grad(model(rows), model.parameters())
    model.compile(backend=functools.partial(compile_region, handler=handler), dynamic=False)
    assert all(map(torch.equal, torch.autograd.grad(model(rows), model.parameters()), expected))
    forward, backward = handler.graphs
    assert handler.num_swaps > 3
    assert not forward.find_nodes(op="call_function", target=ops.swap_out_wait)
    assert len(backward.find_nodes(op="call_function", target=ops.swap_out_wait)) == handler.num_swaps
    assert handler.engine.num_in == handler.num_swaps
    assert not any(handler.engine.num_held)


class Gentle(MemoryEngine):
    """Which leaves what is released to its other owners, as real memory is left."""

    def out_done(self, token, x):
        pass


@pytest.mark.parametrize("seed", range(3))
def test_a_backward_can_run_twice_after_its_forward_swapped(seed):
    rows, model, handler = torch.randn(4, 16), PartReadLate(), RandomlySwapped(seed, 0.9)
    handler.engine = Gentle()
    expected = torch.autograd.grad(model(rows), model.parameters())
    model.compile(backend=functools.partial(compile_region, handler=handler), dynamic=False)
    loss = model(rows)
    for is_last in (False, True):
        found = torch.autograd.grad(loss, model.parameters(), retain_graph=not is_last)
        assert all(map(torch.equal, found, expected))


def test_a_graph_without_tensors_is_unchanged():
    graph = torch.fx.Graph()
    graph.output((3,))  # seen between two graph breaks of a detection model
    lowered = lower((without_backward(torch.fx.GraphModule({}, graph)),), parameters={}, name="t")
    plan = Plan("none", 1, (), 0.0, 0)
    insert_swaps(schedule(lowered.program, ()), lowered.graphs, plan, engine=0)
    assert compile_boxed(lowered.graphs[0].module)([]) == (3,)
