"""Steps that save tensors in another order each time: planned when they recur, and fast until then."""

import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import PlanMismatch, TierError
from lmswap.saved_tensors.recording import Recording
from lmswap.session.hooked_calls import HookedCalls
from lmswap.session.session import Session
from lmswap.session.step_planning import StepPlanning
from tests.training import session_of


class Routed(nn.Module):
    """Runs its layers, of different widths, in the given order."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64 + 8 * n), nn.SiLU()) for n in range(1, 5))
        self.back = nn.ModuleList(nn.Linear(64 + 8 * n, 64) for n in range(1, 5))
        self.order = range(4)

    def forward(self, x):
        for at in self.order:
            x = x + self.back[at](self.layers[at](x))
        return x


ORDERS = list(itertools.permutations(range(4)))


def train(model, orders):
    """The gradients of a step in each of ``orders``."""
    torch.manual_seed(1)
    found = []
    for order in orders:
        model.order = order
        model(torch.randn(512, 64)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
    return found


@pytest.fixture
def planned(monkeypatch):
    """The number of steps that a plan was made for, one entry each."""
    made, plan = [], Session.plan_recorded
    monkeypatch.setattr(Session, "plan_recorded", lambda *given: made.append(0) or plan(*given))
    return made


def enabled(budget="4GiB", **options):
    torch.manual_seed(0)
    return lmswap.enable(Routed(), budget, compiler="eager", min_swap_bytes=1024, **options)


def expected(orders):
    torch.manual_seed(0)
    return train(Routed(), orders)


def test_an_order_is_planned_when_it_recurs_and_the_first_at_once(planned):
    orders = [*ORDERS[:3], *ORDERS[20:21] * 4]
    model = enabled()
    assert all(map(torch.equal, train(model, orders), expected(orders)))
    assert len(planned) == 2
    assert session_of(model).current_step() is not None  # of the last order
    lmswap.disable(model)


def test_steps_that_never_recur_are_recorded_no_more_until_one_does(planned, monkeypatch):
    recorded, record = [], Recording.recorded
    monkeypatch.setattr(Recording, "recorded", lambda *given: recorded.append(0) or record(*given))
    model = enabled()
    train(model, ORDERS[:20])
    assert len(recorded) < 8
    train(model, [ORDERS[7], ORDERS[21], *ORDERS[7:8] * 4])
    assert len(planned) == 2
    assert session_of(model).current_step() is not None
    lmswap.disable(model)


def test_a_step_that_fits_keeps_its_tensors_without_a_plan():
    model = enabled()
    for order in ORDERS[:8]:
        train(model, [order])
        swapped_bytes = lmswap.report(model).swapped_out_bytes
        assert (swapped_bytes > 0) == (order == ORDERS[0])  # nothing is known of a first step
    lmswap.disable(model)


def test_a_plan_may_swap_tensors_that_the_step_before_it_kept(monkeypatch):
    monkeypatch.setattr(HookedCalls, "spare_bytes", lambda call, _: 2**30 if call.known_steps() else 0)
    model = enabled(policy="swap_all")
    swapped = []
    for order in (ORDERS[0], *ORDERS[1:2] * 3):
        train(model, [order])
        swapped.append(lmswap.report(model).swapped_out_bytes)
    assert max(swapped[1:3]) < swapped[0]  # a part had left by the plan for another order
    assert max(swapped[1:3]) < swapped[3]
    lmswap.disable(model)


@pytest.mark.slow
def test_unplanned_steps_over_the_budget_swap_only_a_part():
    def run(model):
        torch.manual_seed(1)
        for order in ORDERS[:6]:
            model.order = order
            model(torch.randn(2**16, 64)).square().mean().backward()
            yield lmswap.report(model)
            model.zero_grad()

    model = enabled("256MiB")
    first, _, *others = run(model)
    for report in others:
        assert 0 < report.swapped_out_bytes < first.swapped_out_bytes
    assert others[-1].highest_peak_bytes <= 256 * 2**20
    lmswap.disable(model)


def test_policy_swap_all_swaps_all_of_steps_without_a_plan():
    model = enabled(policy="swap_all")
    train(model, ORDERS[:1] * 3)
    model.order = ORDERS[0]
    outputs, used_bytes = [], []
    for _ in range(3):  # the second has no plan, as the backward of the first has not run
        outputs.append(model(torch.randn(512, 64)))
        used_bytes.append(lmswap.report(model).tier_used_bytes)
    assert used_bytes[0] > 0
    assert used_bytes[1] - used_bytes[0] >= used_bytes[0] <= used_bytes[2] - used_bytes[1]
    lmswap.disable(model)


@pytest.mark.parametrize("error", [TierError("the tier is full"), PlanMismatch("no step like this one")])
def test_a_step_whose_plan_is_refused_is_refused_by_every_later_call(error, monkeypatch):
    model = enabled()
    train(model, ORDERS[:1])

    def refuse(*_):
        raise error

    monkeypatch.setattr(StepPlanning, "plan", refuse)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            train(model, ORDERS[:1])
    assert not session_of(model).graphs
    lmswap.disable(model)
