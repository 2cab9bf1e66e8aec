import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lmswap.analyze.cost import unit
from lmswap.analyze.memory import StepMemory
from lmswap.capture.aot import GraphHandler, compile_region
from lmswap.capture.lower import Lowered, lower
from lmswap.ir.plan import Recompute
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.rewrite.insert import insert_swaps
from lmswap.rewrite.recompute import insert_recomputes
from lmswap.runtime.codegen import compile_boxed
from tests.capture.captured import METER
from tests.models import CASES, Case, quick_of
from tests.rewrite.memory_engine import MemoryEngine
from tests.rewrite.random_plans import random_plan
from tests.rewrite.random_recomputes import random_recomputes, recompute_all

Chooser = Callable[[Program], Sequence[Recompute]]


class Block(nn.Module):
    """Every kind of normalisation and randomness, activations, upsampling and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(2, 8, 3, padding=1), nn.Conv3d(8, 8, 3, 2, 1)
        self.instance, self.batch = nn.InstanceNorm3d(8, affine=True), nn.BatchNorm3d(8)
        self.group, self.layer = nn.GroupNorm(2, 16), nn.LayerNorm(8)
        self.channels, self.values = nn.Dropout3d(0.3), nn.Dropout(0.3)
        self.head = nn.Conv3d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.leaky_relu(self.instance(self.conv1(x)))
        y = self.channels(F.gelu(self.batch(self.conv2(skip))))
        y = self.layer(F.interpolate(y, scale_factor=2))
        return self.head(self.values(self.group(torch.cat([skip, y], 1))))


BLOCK = Case(Block, lambda: torch.randn(2, 2, 8, 8, 8))


class HalfBlock(Block):
    """On CPUs the statistics of its normalisations are float32, where their tracing says bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


MODELS = CASES | {"block": BLOCK}
HALF = {"half_block": Case(HalfBlock, BLOCK.batch)}  # a tensor swapped in gets the traced dtype: not swapped


class Rewritten(GraphHandler):
    """A graph handler that recomputes what ``choose`` selects, and swaps a share of all gaps of the result."""

    output_metadata = METER.output_metadata

    def __init__(self, choose: Chooser, swap_share: float = 0.0, seed: int = 0) -> None:
        self.choose, self.swap_share = choose, swap_share
        self.rng, self.engine = random.Random(seed), MemoryEngine()
        self.num_recomputes = 0
        self.saved_bytes: list[int] = []

    def note(self, text):
        pass

    def edit(self, graphs, parameters):
        self._rewrite(lower(graphs, parameters=parameters, name="t"))
        if len(graphs) > 1:
            storages = [node.meta["val"].untyped_storage() for node in graphs[0].saved]
            self.saved_bytes.append(sum({storage._cdata: storage.nbytes() for storage in storages}.values()))

    def compiled(self, module, phase):
        return compile_boxed(module)

    def _rewrite(self, lowered: Lowered) -> None:
        self.recomputes = self.choose(lowered.program)
        self.num_recomputes += len(self.recomputes)
        runs, graphs = insert_recomputes(lowered.program, lowered.graphs, self.recomputes)
        plan = random_plan(runs.program, self.rng, share=self.swap_share)
        insert_swaps(runs, graphs, plan, engine=self.engine.number)


def train(case: Case, handler: Rewritten):
    """Losses, gradients, buffers and random draws of two steps and an eval pass."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make()
    model.compile(backend=lambda module, inputs: compile_region(module, inputs, handler), dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    for _ in range(2):
        loss = case.loss(model(case.batch()))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        results += [buffer.clone() for buffer in model.buffers()]
        results.append(torch.rand(3))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        results.append(case.loss(model(case.batch())))
    return results


def never(program: Program) -> Sequence[Recompute]:
    return ()


@functools.cache
def plain(name: str):
    return train((MODELS | HALF)[name], Rewritten(never))


def assert_same_bits(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# Without the network whose graphs are the longest.
WAYS = [(name, *way) for name in MODELS for way in ((0, 0.0), (1, 0.8), (2, 0.8)) if name != "unet3d"]
QUICK = [("encoder", 1, 0.8), ("resnet", 0, 0.0), ("block", 1, 0.8)]


@pytest.mark.parametrize(("name", "seed", "swap_share"), quick_of([*WAYS, ("unet3d", 1, 0.8)], QUICK))
def test_any_valid_recomputes_are_bitwise_identical_to_none(name, seed, swap_share):
    rng = random.Random(seed)
    handler = Rewritten(lambda program: random_recomputes(program, rng), swap_share, seed)
    actual = train(MODELS[name], handler)
    assert handler.num_recomputes > 10
    assert (handler.engine.num_out > 10) == (swap_share > 0)
    assert_same_bits(actual, plain(name))


def storages(values) -> dict[StorageWeakRef, int]:
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}


# By which `lmswap.runtime.ops.view_bytes` shows memory as another tensor.
OF_VIEWS = (torch.ops.aten.empty.memory_format, torch.ops.aten.set_.source_Storage_storage_offset)


class Held(TorchDispatchMode):
    """Notes after each op how many bytes of what ops have made, and of what is put into ``made``, are held."""

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[int] = []
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        if op.namespace != "lmswap" and op not in OF_VIEWS:
            given = storages(args)
            self.made |= {storage: nbytes for storage, nbytes in storages(result).items() if storage not in given}
            self.curve.append(sum(nbytes for storage, nbytes in self.made.items() if not storage.expired()))
        return result


class Watched(Rewritten):
    """Also watches what the graphs of a training step hold."""

    def __init__(self, choose: Chooser) -> None:
        super().__init__(choose)
        self.held = Held()

    def compiled(self, module, phase):
        function = super().compiled(module, phase)

        def watch(arguments):
            tangents = arguments[-self.num_tangents :] if phase == "backward" else []  # callers may hold them
            self.held.made |= storages(tangents)
            with self.held:
                return function(arguments)

        return watch

    def _rewrite(self, lowered: Lowered) -> None:
        super()._rewrite(lowered)
        self.program = schedule(lowered.program, self.recomputes).program
        inputs = lowered.graphs[-1].module.graph.find_nodes(op="placeholder")
        self.num_tangents = sum("tangents" in node.target for node in inputs)


@pytest.mark.parametrize(
    "choose",
    [never, recompute_all, lambda program: random_recomputes(program, random.Random(1))],
    ids=["never", "all", "random"],
)
@pytest.mark.parametrize("name", quick_of(["block", "encoder", "resnet"], ["block"]))
def test_the_graphs_hold_at_no_op_more_than_the_schedule_states(name, choose):
    torch.compiler.reset()
    handler, case = Watched(choose), MODELS[name]
    model = case.make()
    model.compile(backend=lambda module, inputs: compile_region(module, inputs, handler), dynamic=False)
    batch = case.batch()
    output = model(batch)  # held to the end, as the schedule has it
    case.loss(output).backward()
    curve = StepMemory(handler.program, unit(handler.program)).curve.tolist()
    # The watch does not see lmswap's own ops: losses, and the small states of generators, which go where nothing draws
    # again.
    watched = [not op.target.startswith("lmswap") for op in handler.program.ops]
    planned = list(itertools.compress(curve, watched))
    excess = [max(0, held - bound) for held, bound in zip(handler.held.curve, planned, strict=True)]
    assert max(excess) == 0


SHORT = [name for name in MODELS | HALF if name != "unet3d"]


@pytest.mark.parametrize("name", quick_of(SHORT, ["shared_views", "block", *HALF]))
def test_all_repeatable_ops_are_recomputed_before_each_use(name):
    handler = Rewritten(recompute_all)
    actual = train((MODELS | HALF)[name], handler)
    assert_same_bits(actual, plain(name))
    reference = Rewritten(never)
    train((MODELS | HALF)[name], reference)
    assert handler.saved_bytes < reference.saved_bytes
