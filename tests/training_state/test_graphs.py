"""Swapped weights in models of several graphs, with recomputation, shared and returned weights: plain torch's bits."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap.errors import NotManaged
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Lane
from lmswap.planner import make_plan, reprice
from lmswap.session import planner
from tests.training import session_of
from tests.training_state.adapted import same

WIDTH = 32


class Base(nn.Module):
    """Three frozen layers, and a trained one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.trained = nn.Linear(WIDTH, WIDTH)
        for layer in (self.one, self.two, self.three):
            layer.requires_grad_(False)


class Broken(Base):
    """Two graphs, both of which read one of the weights."""

    def forward(self, x):
        x = torch.tanh(self.one(self.trained(x)))
        torch._dynamo.graph_break()
        return self.two(torch.tanh(self.one(x))).square().mean()


class Checkpointed(Base):
    """Weights that a checkpointed region reads twice."""

    def inside(self, x):
        return self.three(torch.tanh(self.two(x)))

    def forward(self, x):
        return checkpoint(self.inside, self.one(self.trained(x)), use_reentrant=False).square().mean()


class Dropping(Base):
    """Random ops between frozen layers."""

    def forward(self, x):
        x = nn.functional.dropout(torch.relu(self.one(self.trained(x))), 0.3)
        return self.three(nn.functional.dropout(torch.relu(self.two(x)), 0.3)).square().mean()


class Returning(Base):
    """A loss, a weight, and a view of another one."""

    def forward(self, x):
        x = self.two(torch.tanh(self.one(self.trained(x))))
        return x.square().mean(), self.one.weight, self.two.weight.t()[1:3]


class Sliced(Base):
    """Parameters that share a storage, at other offsets than 0."""

    def __init__(self):
        super().__init__()
        both = torch.cat([self.one.weight.detach(), self.two.weight.detach()])
        self.one.weight = nn.Parameter(both[:WIDTH], requires_grad=False)
        self.two.weight = nn.Parameter(both[WIDTH:], requires_grad=False)

    def forward(self, x):
        return self.three(torch.tanh(self.two(torch.tanh(self.one(self.trained(x)))))).square().mean()


class Transposed(Base):
    """A weight that is read as it is, transposed, and as a view of complex numbers."""

    def forward(self, x):
        w = self.one.weight
        x = self.trained(x) @ w.t() + self.trained(x) @ w
        turned = torch.view_as_complex(w.view(WIDTH, WIDTH // 2, 2)).conj()
        return (x.square().mean() + torch.view_as_real(turned.resolve_conj()).mean() * x.mean()).abs()


class Cast(Base):
    """A frozen layer in bfloat16."""

    def __init__(self):
        super().__init__()
        self.one.to(torch.bfloat16)

    def forward(self, x):
        x = self.one(self.trained(x).to(torch.bfloat16)).float()
        return self.two(x).square().mean()


def run(kind, *, options=None, steps=4):
    torch.manual_seed(0)
    model = kind()
    if options:
        lmswap.enable(model, "1GiB", weights="swap", min_swap_bytes=1024, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        outputs = model(torch.randn(6, WIDTH))
        loss, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        loss.backward()
        seen += [loss.detach(), *(other.clone() for other in others)]
        del outputs, others, loss
        optimizer.step()
        optimizer.zero_grad()
    swapped_bytes = 0
    if options:
        report = lmswap.report(model)
        swapped_bytes = report.swapped_in_bytes
        assert swapped_bytes == report.predicted.lane_bytes(Lane.IN)
    seen += [parameter.detach().clone() for parameter in model.parameters()]
    lmswap.disable(model)
    return seen, swapped_bytes


@pytest.mark.filterwarnings("ignore::lmswap.errors.NotManaged")
@pytest.mark.parametrize("options", [{"policy": "swap_all"}, {"policy": "swap_all", "verify": True}], ids=str)
@pytest.mark.parametrize(
    "kind", [Broken, Checkpointed, Dropping, Returning, Sliced, Transposed, Cast], ids=lambda kind: kind.__name__
)
def test_bits_are_those_of_plain_torch(kind, options):
    expected, _ = run(kind)
    found, swapped_bytes = run(kind, options=options)
    assert same(found, expected)
    assert swapped_bytes > 4 * WIDTH * WIDTH


def test_a_returned_weight_is_the_parameter_itself():
    torch.manual_seed(0)
    model = lmswap.enable(Returning(), "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024)
    _, weight, view = model(torch.randn(2, WIDTH))
    with torch.no_grad():
        model.one.weight.fill_(2)
        model.two.weight.fill_(3)
    assert torch.all(weight == 2)
    assert torch.all(view == 3)
    with pytest.warns(NotManaged, match="stay in the memory of the (disk|host) tier"):
        lmswap.disable(model)


class Scaled(nn.Module):
    """A layer that breaks the graph, and whose weight has the name that others' have, too."""

    def __init__(self, *, trained: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=trained)

    def forward(self, x):
        x = torch.tanh(x @ self.weight)
        torch._dynamo.graph_break()
        return torch.tanh(x @ self.weight.t())


class Nested(nn.Module):
    """A trained and a frozen layer, each in graphs of its own, below a frozen weight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Scaled(trained=True), Scaled(trained=False)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)

    def forward(self, x):
        return self.two(self.one(x @ self.weight)).square().mean()


def test_parameters_are_known_by_their_identity_in_frames_of_inner_modules():
    expected, _ = run(Nested)
    found, swapped_bytes = run(Nested, options={"policy": "swap_all"})
    assert same(found, expected)
    assert swapped_bytes > 4 * WIDTH * WIDTH
    torch.manual_seed(0)
    model = lmswap.enable(Nested(), "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024)
    model(torch.randn(6, WIDTH)).backward()
    find = session_of(model).engine.host_copies.find
    assert find(model.one.weight.untyped_storage()) is None  # trained
    assert find(model.two.weight.untyped_storage()) is not None
    assert find(model.weight.untyped_storage()) is not None


def fetched_once(policy, program, costs, machine, *, budget_bytes, **limits):
    """Return the plan that fetches each weight at its first use and holds the copy over the backward's start."""
    plan = make_plan(policy, program, costs, machine, budget_bytes=budget_bytes, **limits)
    weights = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.WEIGHT}
    kept = (swap for swap in plan.swaps if swap.buffer not in weights or swap.crosses_end(len(program.ops)))
    fewer = replace(plan, swaps=tuple(kept))
    return reprice(fewer, program, costs, machine, min_swap_bytes=limits["min_swap_bytes"], tier=limits["tier"])


def held_at_the_turn(policy, program, costs, machine, *, budget_bytes, **limits):
    """Return the plan that holds each weight from its last use in the forward to its first in the backward."""
    plan = make_plan(policy, program, costs, machine, budget_bytes=budget_bytes, **limits)
    turn = program.segments[-1].start
    at_turn = [swap for swap in plan.swaps if swap.release <= turn <= swap.in_start < len(program.ops)]
    fewer = replace(plan, swaps=tuple(swap for swap in plan.swaps if swap not in at_turn))
    return reprice(fewer, program, costs, machine, min_swap_bytes=limits["min_swap_bytes"], tier=limits["tier"])


class Repeated(Base):
    """Weights that forward and backward read twice, as recomputes do."""

    def forward(self, x):
        x = self.trained(x)
        for layer in (self.one, self.two, self.one, self.two):
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_a_weight_that_is_held_at_the_turn_is_fetched_again_later(monkeypatch):
    expected, _ = run(Repeated)
    monkeypatch.setattr(planner, "make_plan", held_at_the_turn)
    found, swapped_bytes = run(Repeated, options={"policy": "swap_all"})
    assert same(found, expected)
    assert swapped_bytes == 6 * 4 * WIDTH * WIDTH


@pytest.mark.parametrize("planned", [make_plan, fetched_once], ids=["fetched again", "fetched once"])
@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_a_weight_that_is_written_before_its_backward_is_detected(name, planned, monkeypatch):
    monkeypatch.setattr(planner, "make_plan", planned)
    torch.manual_seed(0)
    model = lmswap.enable(Dropping(), "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024)
    loss = model(torch.randn(6, WIDTH))
    with torch.no_grad():
        getattr(model, name).weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
