"""The search for the largest size of a model's inputs that fits a budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmswap.analyze.cost import unit
from lmswap.analyze.memory import StepMemory
from lmswap.cli.fit import Outcome, find_largest
from lmswap.cli.step_plan import StepPlan
from lmswap.errors import PlanInfeasible, TierError
from tests.ir.build import build
from tests.reporting.small_step import MACHINE, PLAN

Need = Callable[[int], int]  # bytes by size
BUDGET_BYTES = 10_000

# By op, the bytes of what it makes; and the power of the size that inputs grow with.
STEPS: dict[str, tuple[list[Need], int]] = {
    "in proportion": ([lambda n: 7 * n], 1),
    "with constants": ([lambda n: 3000 + 5 * n, lambda n: 40 * n], 1),
    "one op is the largest only at small sizes": ([lambda n: 4000 + n, lambda n: 30 * n + 1], 1),
    "scores of attention": ([lambda n: 3 * n * n, lambda n: 50 * n], 1),
    "volumes": ([lambda n: 4 * n**3 + 100, lambda n: 9 * n**3], 3),
    "only the smallest fits": ([lambda n: 6000 * n], 1),
}


class Steps:
    """Steps whose ops make buffers of given sizes, and what planning them needs beyond."""

    def __init__(self, needs: list[Need], extra_bytes: int = 0) -> None:
        self.needs, self.extra_bytes = needs, extra_bytes
        self.traced: list[int] = []

    def memory_of(self, size: int) -> StepMemory:
        self.traced.append(size)
        ops = [f"f{number} 1: x -> a{number}" for number in range(len(self.needs))]
        sizes = {f"a{number}": need(size) for number, need in enumerate(self.needs)}
        program = build("\n".join(["inference", *ops]), sizes=sizes).program
        return StepMemory(program, unit(program))

    def needed_bytes(self, memory: StepMemory) -> int:
        return int(memory.floor.max()) + self.extra_bytes

    def plan(self, memory: StepMemory) -> Outcome:
        needed_bytes = self.needed_bytes(memory)
        if needed_bytes <= BUDGET_BYTES:
            return StepPlan(memory, MACHINE, PLAN, BUDGET_BYTES, 0.0)
        parts = (("for the step's tensors", needed_bytes),)
        return PlanInfeasible(budget_bytes=BUDGET_BYTES, needed_bytes=needed_bytes, where="op 0", parts=parts)

    def largest(self) -> int:
        size = 1
        while max(need(size + 1) for need in self.needs) + self.extra_bytes <= BUDGET_BYTES:
            size += 1
        return size


def fitting(tried: dict[int, Outcome]) -> list[int]:
    return [size for size, outcome in tried.items() if isinstance(outcome, StepPlan)]


@pytest.mark.parametrize("extra_bytes", [0, 700])
@pytest.mark.parametrize("name", STEPS)
def test_the_largest_size_that_fits_is_found_with_few_traces(name: str, extra_bytes: int) -> None:
    needs, degree = STEPS[name]
    steps = Steps(needs, extra_bytes)
    tried = find_largest(steps.memory_of, steps.plan, BUDGET_BYTES, degree)
    assert max(fitting(tried)) == steps.largest()
    assert list(tried) == sorted(steps.traced)
    assert len(steps.traced) <= 5


def test_sizes_that_need_what_grows_in_proportion_are_traced_twice() -> None:
    steps = Steps(STEPS["in proportion"][0])
    find_largest(steps.memory_of, steps.plan, BUDGET_BYTES, 1)
    assert steps.traced == [1, steps.largest()]


def test_if_no_size_fits_the_smallest_is_refused() -> None:
    steps = Steps([lambda n: BUDGET_BYTES * n + 1])
    tried = find_largest(steps.memory_of, steps.plan, BUDGET_BYTES, 1)
    assert [*tried] == [1]
    assert isinstance(tried[1], PlanInfeasible)


def test_the_search_ends_where_nothing_depends_on_the_size() -> None:
    steps = Steps([lambda _: 5000])
    assert max(fitting(find_largest(steps.memory_of, steps.plan, BUDGET_BYTES, 1))) == 10**9
    assert len(steps.traced) <= 5


def test_a_tier_that_is_too_small_limits_the_size() -> None:
    steps = Steps(STEPS["in proportion"][0])

    def plan(memory: StepMemory) -> Outcome:
        return TierError("full") if steps.needed_bytes(memory) > BUDGET_BYTES // 3 else steps.plan(memory)

    tried = find_largest(steps.memory_of, plan, BUDGET_BYTES, 1)
    assert max(fitting(tried)) == BUDGET_BYTES // 3 // 7
