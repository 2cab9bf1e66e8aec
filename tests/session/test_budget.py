"""Reading what a step may occupy changes nothing; a budget that is a share is set for a step explicitly."""

import pytest

from lmswap.errors import PlanInfeasible
from lmswap.options import Options
from lmswap.session.budget import BudgetTracker
from lmswap.session.diagnostics import Notes
from lmswap.training_state.optimizer_memory import TrainableParameters
from tests.ir.build import build
from tests.training_state.no_weights import no_weights

MIB = 2**20


class FakeMemory:
    """60 MiB are in use; nothing can be trimmed, as it has no method for that."""

    total_bytes = free_bytes = staticmethod(lambda: 2**30)
    used_bytes = staticmethod(lambda: 60 * MIB)
    reusable_bytes = staticmethod(lambda: 0)
    used_tensor_bytes = staticmethod(lambda: 40 * MIB)


def step_of(mib: int):
    return build("forward\nf1 1: x -> a\nf2 1: a -> y", sizes={"x": mib * MIB, "a": mib * MIB}, outputs="y")


def tracker(budget: str) -> tuple[BudgetTracker, Notes]:
    notes = Notes("Net")
    return BudgetTracker(
        Options.parse(budget), "cpu", FakeMemory(), TrainableParameters(lambda: []), no_weights(), notes=notes
    ), notes


@pytest.mark.parametrize("budget", ["50%", "1GiB", "auto"])
def test_reading_an_allowance_changes_nothing(budget):
    tracked, notes = tracker(budget)
    nbytes, said = tracked.nbytes, [*notes]
    first = tracked.allowance(step_of(64).program)
    assert tracked.allowance(step_of(64).program) == first
    assert (tracked.nbytes, [*notes]) == (nbytes, said)
    assert (first.budget_bytes, first.found_bytes, first.tensor_bytes) == (nbytes, 60 * MIB, 40 * MIB)


def test_a_share_refers_to_the_largest_step_so_far():
    tracked, notes = tracker("50%")
    budgets = []
    for mib in (64, 32, 128):
        step = step_of(mib)
        tracked.take_share(step.program, step.costs, tracked.allowance(step.program))
        budgets.append(tracked.nbytes - tracked.allowance(step.program).fixed_bytes)
    assert budgets[0] == budgets[1] < budgets[2]
    (note,) = notes
    assert "50 % of the 128.00 MiB" in note


def test_what_first_runs_of_ops_leave_is_reserved_until_their_step_is_over():
    tracked, _ = tracker("1GiB")
    program = step_of(64).program
    tracked.expect_first_runs(5 * MIB, 3)
    tracked.expect_first_runs(3 * MIB, 3)  # of a second graph of the step
    reserved = []
    for number in (3, 4):
        tracked.begin_step(number)
        reserved.append(tracked.allowance(program).reserve_bytes)
    assert reserved == [8 * MIB, 0]


def refusal(needed_bytes):
    return PlanInfeasible(budget_bytes=0, needed_bytes=needed_bytes, where="op 0")


def test_other_budgets_include_any_step():
    tracked, notes = tracker("1GiB")
    step = step_of(64)
    tracked.take_share(step.program, step.costs, tracked.allowance(step.program))
    assert (tracked.nbytes, [*notes]) == (2**30, [])
    assert not tracked.widen(tracked.allowance(step.program), refusal(2**31))


def test_a_small_percentage_is_widened_up_to_the_device():
    tracked, notes = tracker("1%")
    step = step_of(64)
    tracked.take_share(step.program, step.costs, tracked.allowance(step.program))
    planned = tracked.allowance(step.program)
    needed_bytes = planned.budget_bytes + 8 * MIB
    assert not tracked.widen(planned, refusal(tracked.max_bytes + 1))
    assert tracked.widen(planned, refusal(needed_bytes))
    assert tracked.nbytes == needed_bytes
    (note,) = notes  # in place of what the share was
    assert "is too small for this step" in note
