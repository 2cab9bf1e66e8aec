"""A replanned step keeps the graphs that torch traced for it, and is bitwise identical to plain torch."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap.capture import aot_stages
from lmswap.capture.aot import compile_region
from lmswap.planner.cache import PlanCache
from lmswap.session import compiled_graph, planner
from lmswap.session.planned_step import Phase
from lmswap.session.replan import Replanner
from lmswap.session.session import Session
from tests.capture.captured import Recording
from tests.models import CASES, Broken, BrokenBlock, Case
from tests.rewrite.random_planner import plan_at_random

NUM_STEPS = 5


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x).tanh().exp()
        y = torch.cond(y.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (y,))
        return self.linear(y).tanh()


class Checkpointed(nn.Module):
    """Draws inside of checkpoints, a buffer that is written, and constants."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.norm, self.positions = nn.BatchNorm1d(64), torch.arange(64.0)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.norm(x + self.positions * torch.tensor(0.5))


class Part(nn.Module):
    """Code of its own, which Dynamo captures where what calls it is not captured."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class InFull(Part):
    """Without autocast, also where it is called under it."""

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class PartlyCast(nn.Module):
    """A graph without autocast, and then one under it, of which one part is without it again."""

    def __init__(self):
        super().__init__()
        self.full = Part(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.cast = Part(nn.Linear(64, 64), nn.Tanh(), InFull(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64))

    @torch.compiler.disable(recursive=False)
    def forward(self, x):
        x = self.full(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.cast(x)


class TwoWays(nn.Module):
    """Two ways in, a graph for each, and the same graph at the end of both."""

    def __init__(self):
        super().__init__()
        self.ways = nn.ModuleList(Part(nn.Linear(64, n), nn.Tanh(), nn.Linear(n, 64), nn.Tanh()) for n in (64, 128))
        self.end = Part(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))))

    @torch.compiler.disable(recursive=False)
    def forward(self, x, way):
        return self.end(self.ways[way](x))


class OfTwo(nn.Sequential):
    """Its weights are tensors of a class of their own, which torch traces as the tensors in them."""

    def __init__(self):
        super().__init__(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        for linear in (self[0], self[2]):
            linear.weight = nn.Parameter(TwoTensor(linear.weight.detach(), 2 * linear.weight.detach()))


def rows():
    return torch.randn(64, 64)


MODELS = {
    "resnet": CASES["resnet"],
    "shared views": CASES["shared_views"],
    "several graphs": Case(Broken, lambda: torch.randn(64, 128)),
    "graphs that run twice": Case(
        lambda: nn.Sequential(BrokenBlock(), BrokenBlock(), BrokenBlock()), lambda: torch.randn(64, 128)
    ),
    "branches": Case(Branches, rows),
    "checkpoints": Case(Checkpointed, rows),
    "tensors of another class": Case(OfTwo, rows),
    "autocast in one graph": Case(PartlyCast, rows),
}
QUICK = ["several graphs", "branches", "checkpoints", "tensors of another class"]
WHICH = [
    *(pytest.param(("fx", name), marks=[pytest.mark.slow] * (name not in QUICK)) for name in MODELS),
    *(pytest.param(("inductor", name), marks=pytest.mark.slow) for name in ("checkpoints", "branches")),
]


def calls_of(monkeypatch, owner, name):
    """The arguments of each call of a function from now on."""
    found, function = [], getattr(owner, name)

    def count(*arguments):
        found.append(arguments)
        return function(*arguments)

    monkeypatch.setattr(owner, name, count)
    return found


@pytest.fixture
def traces(monkeypatch):
    """Calls of what traces a region."""
    return calls_of(monkeypatch, aot_autograd, "aot_stage1_graph_capture")


@pytest.fixture
def regions(monkeypatch):
    """The graphs that Dynamo has passed."""
    return calls_of(monkeypatch, Session, "__call__")


@pytest.fixture
def plans(monkeypatch):
    """The plans made so far; each step is replanned."""
    made = []

    def apply(self, run, _):
        step = self._plans[run.graphs]
        made.append(self._plans.make(run.graphs, step.merged, step.costs).plan)
        return True

    monkeypatch.setattr(Replanner, "apply", apply)
    monkeypatch.setattr(PlanCache, "read", lambda *_: None)
    return made


def parts(tensor):
    return (tensor.a, tensor.b) if isinstance(tensor, TwoTensor) else (tensor,)


def train(model, call, case):
    """Losses, gradients, buffers and the next draw."""
    torch.manual_seed(1)
    found = []
    for _ in range(NUM_STEPS):
        model.zero_grad()
        loss = case.loss(call(case.batch()))
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]
    return [part for tensor in (*found, *model.buffers()) for part in parts(tensor)]


@pytest.mark.parametrize("which", WHICH, ids="-".join)
def test_replanning_a_step_traces_nothing(which, plans, regions, traces, monkeypatch):
    compiler, name = which
    case = MODELS[name]
    if compiler == "fx":  # what Inductor fuses depends on the plan, and so do roundings
        monkeypatch.setattr(planner, "make_plan", plan_at_random(0))
    torch.manual_seed(0)
    torch.compiler.reset()
    model, plain = (case.make(), case.make())
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    expected = train(plain, torch.compile(plain, dynamic=False) if compiler == "inductor" else plain, case)
    traces.clear()
    torch.compiler.reset()
    lmswap.enable(model, "4GiB", policy="swap_all", min_swap_bytes=1, compiler=compiler)
    actual = train(model, model, case)
    lmswap.disable(model)
    assert len(plans) >= 2 and all(plan.swaps for plan in plans)
    assert len({plan.recomputes for plan in plans}) == (len(plans) if compiler == "fx" else 1)
    assert len(traces) == len(regions) > 0
    assert len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def test_replanning_a_forward_without_training_traces_nothing(plans, traces, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(planner, "make_plan", plan_at_random(0))
    model, data = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]), rows()
    expected = model(data).detach()
    lmswap.enable(model.requires_grad_(False), "4GiB", min_swap_bytes=1)
    assert all(torch.equal(model(data), expected) for _ in range(NUM_STEPS))
    assert len(plans) >= 3 and all(plan.swaps and plan.recomputes for plan in plans)
    assert len(traces) == 1
    lmswap.disable(model)


def test_backward_follows_the_plan_of_its_forward_after_a_replan(plans, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(planner, "make_plan", plan_at_random(5))
    made, held = TwoWays(), []

    def results(model):
        torch.manual_seed(0)
        found = []

        def backward(loss):
            model.zero_grad()
            loss.backward()
            found.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

        for way in (0, 1):
            backward(model(rows(), way).square().mean())
        for way in (0, 1, 0, 1):
            held.append(model(rows(), way).square().mean())
            model.requires_grad_(False)
            found += [model(rows(), 0) for _ in range(3)]  # shows that no backward is waited for
            model.requires_grad_(True)
            backward(model(rows(), 1 - way).square().mean())
            backward(held.pop())
        return found

    expected = results(copy.deepcopy(made))
    model = lmswap.enable(made, "4GiB", min_swap_bytes=1)
    assert all(map(torch.equal, results(model), expected))
    assert len(plans) >= 4
    lmswap.disable(model)


def test_graphs_of_two_plans_share_no_branches():
    torch.compiler.reset()
    regions, handlers = [], [Recording(), Recording()]

    def backend(module, inputs):
        regions.append(compile_region(module, inputs, handlers[0]))
        return regions[0]

    torch.compile(Branches(), backend=backend, dynamic=False)(rows())
    regions[0].compile_again(handlers[1])
    one, other = ({*handler.lowered[0].graphs[0].module.children()} for handler in handlers)
    assert len(one) == len(other) == 2 and one.isdisjoint(other)


def test_traces_hold_no_batch_and_graphs_of_replaced_plans_are_released(plans, monkeypatch):
    torch.compiler.reset()
    compiled = []

    def note(self, *arguments, compile_region=aot_stages.Compiled.__init__):
        compile_region(self, *arguments)
        compiled.append(weakref.ref(self))

    monkeypatch.setattr(aot_stages.Compiled, "__init__", note)
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), "4GiB", min_swap_bytes=1)
    batches = []
    for _ in range(NUM_STEPS):
        batch = rows()
        batches.append(weakref.ref(batch))
        model(batch).square().mean().backward()
        del batch
    gc.collect()
    assert [reference() is not None for reference in batches] == [False] * NUM_STEPS
    assert len(compiled) >= 4
    assert [reference() is not None for reference in compiled] == [False] * (len(compiled) - 1) + [True]
    weight = weakref.ref(model[0].weight)
    lmswap.disable(model)
    del model
    torch.compiler.reset()
    gc.collect()
    assert weight() is None


def test_gradients_arrive_in_the_order_of_plain_torch_after_a_replan(plans):
    torch.compiler.reset()

    def arrivals(model):
        found = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
        for _ in range(NUM_STEPS):
            model(torch.randn(4, 2, 16)).square().mean().backward()
        return found

    model = nn.TransformerEncoderLayer(16, 2, 32)
    expected = arrivals(copy.deepcopy(model))
    assert arrivals(lmswap.enable(model, "4GiB", min_swap_bytes=1)) == expected
    assert len(plans) >= 3
    lmswap.disable(model)


def test_the_first_forward_compiles_all_that_its_plan_runs(monkeypatch):
    """A backward begins at the peak of a step, and the step that times ops is measured: neither has memory for that."""
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)), "2GiB")
    x = torch.randn(8, 64)
    outputs = model(x)
    for compiles in ("compile_boxed", "compile_parts", "with_op_marks"):
        monkeypatch.setattr(compiled_graph, compiles, lambda *_: pytest.fail("compiled"))
    outputs.sum().backward()
    for _ in range(4):
        model(x).sum().backward()
    assert lmswap.api._sessions[model].current_step().history.phase is Phase.FINAL
    lmswap.disable(model)
