"""Policy "auto": the plan with the smallest predicted seconds among those of all policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from threading import Barrier

from lmswap.errors import PlanInfeasible, TierError
from lmswap.hardware.host_memory import release_thread_memory
from lmswap.ir.plan import Plan
from lmswap.planner.baselines import plan_none, plan_swap_all
from lmswap.planner.problem import Problem
from lmswap.planner.search import Found, as_plan, find, find_recompute, find_swap, plan_exactly
from lmswap.planner.tflms import plan_tflms

_Policy = Callable[[Problem], Plan | Found]

# The other policies are seldom better than the searches; on larger steps they would take longer.
_MAX_OPS_FOR_BASELINES = 3_000

# Copies in that searches queue ahead where state streams through the device. An update waits for its state, and the
# state that leaves makes room for the next: one at a time, each lane waits for the other. 7 B parameters in fp32 with
# AdamW (H100, 24 GiB) then take 9.6 instead of 10.7 times the unlimited step at 1,024 tokens, 1.28 instead of 1.32 at
# 32,768. Copies in only, of frozen weights, gain nothing (LoRA on 14 B, 1,024 tokens: 1.13 instead of 1.11), nor do
# those that compute can hide (GH200: 1.008 instead of 1.002).
_PREFETCHES_AHEAD = 16

# Plans are the same on machines with more cores.
_NUM_THREADS = 2

# A search ends in one of several local optima: at 521 ops one seed of three is better by 1 % of the step time.
# Each takes 0.3 s; the third brought the U-Net (bf16, H200, 42 % of the peak) from 2.2 to 1.5 % over the bound.
_SEEDS = (1, 2, 3)
_MAX_OPS_FOR_LAST_SEED = 600
# It is skipped where the others come within this share of the bound.
_CLOSE = 0.01


def plan_auto(problem: Problem) -> Plan:
    """The fastest plan found, with actions keep, swap and recompute chosen buffer by buffer.

    Raises:
        PlanInfeasible: no plan was found that fits; carries the smallest budget that fits.
        TierError: some plan fits the budget, but none the tier.
    """
    if problem.fits(()):
        return replace(plan_none(problem), policy="auto")
    exact = plan_exactly(problem, policy="auto")
    if exact is not None:
        return exact

    searches, baselines = [partial(_search, seed) for seed in _SEEDS], _baselines(problem)
    with _threads() as threads:  # the searches release the GIL
        attempted = replace(problem, find_min_budget=False)

        def found_by(policies: Iterable[_Policy]) -> list[Plan | Found]:
            return [each for each in threads.map(partial(_attempt, attempted), policies) if each is not None]

        found = [] if problem.is_proven_infeasible else found_by(searches[:_NUM_THREADS])
        found_seconds = min((each.predicted_seconds for each in found), default=inf)
        if found_seconds > problem.target_seconds:
            is_close = found_seconds <= (1 + _CLOSE) * problem.target_seconds
            is_small = len(problem.memory.program.ops) <= _MAX_OPS_FOR_LAST_SEED
            found += found_by([*searches[_NUM_THREADS:], *baselines] if is_small and not is_close else baselines)
        # None where the tier is too small for all of them.
        best = _fastest(found) or (_fastest(found_by(baselines)) if found else None)
        if best is None:
            refuse = partial(_refuse, problem)
            refusals = [*threads.map(refuse, searches[:1])]
            if not _is_close_to_least(problem, refusals[0]):
                refusals += threads.map(refuse, baselines)
            raise _refusal(filter(None, refusals))
    return best if best.policy == "auto" else replace(best, policy=f"auto ({best.policy})")


def _attempt(problem: Problem, policy: _Policy) -> Plan | Found | None:
    with suppress(PlanInfeasible, TierError):
        return policy(problem)
    return None


def _fastest(found: Sequence[Plan | Found]) -> Plan | None:
    """The fastest plan that fits the tier; the others are not completed, as that takes as long as a search."""
    for each in sorted(found, key=lambda each: each.predicted_seconds):
        with suppress(TierError):
            return as_plan(each)
    return None


def _refuse(problem: Problem, policy: _Policy) -> PlanInfeasible | TierError | None:
    try:
        as_plan(policy(problem))
    except (PlanInfeasible, TierError) as error:
        return error
    return None


def _is_close_to_least(problem: Problem, refusal: PlanInfeasible | TierError | None) -> bool:
    """Whether no policy could name a much smaller budget."""
    return isinstance(refusal, PlanInfeasible) and refusal.needed_bytes <= problem.close_to_least_bytes


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Provide threads that return their freed memory to the system at the end.

    Up to 48 MiB of 25 ops would come on top of the step that was planned.
    """
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        try:
            yield threads
        finally:
            started = Barrier(_NUM_THREADS)  # holds each thread until all have one of the calls
            for done in [threads.submit(_release_when_all, started) for _ in range(_NUM_THREADS)]:
                done.result()


def _release_when_all(started: Barrier) -> None:
    started.wait()
    release_thread_memory()


def _refusal(found: Iterable[PlanInfeasible | TierError]) -> PlanInfeasible | TierError:
    """The refusal with the smallest budget, named after policy "auto" instead of the one that was tried."""
    refusals = [*found]
    for refusal in refusals:
        if isinstance(refusal, TierError):  # its plan fits the budget
            return refusal
    infeasible = [refusal for refusal in refusals if isinstance(refusal, PlanInfeasible)]
    smallest = min(infeasible, key=lambda refusal: refusal.needed_bytes)
    return PlanInfeasible(
        budget_bytes=smallest.budget_bytes,
        needed_bytes=smallest.needed_bytes,
        where=smallest.where,
        live=smallest.live,
        policy="auto",
    )


def _search(seed: int, problem: Problem) -> Found:
    """Search with ``seed``; cyclic steps for the whole rate of the link, with the first seed if copies cannot hide.

    Where the step takes as long as its copies, slack costs what it was to save. LoRA on 14 B parameters (H100, 24 GiB,
    1,024 tokens) ends 9 % over the bound with slack, 3.1 % without.
    """
    memory = problem.memory
    can_hide = problem.target_seconds <= (1 + _CLOSE) * memory.op_starts[-1]
    if memory.program.is_cyclic:
        if not (can_hide and seed == _SEEDS[0]):
            problem = replace(problem, link_share=1.0)
        if not can_hide and seed != _SEEDS[-1] and _streams_state(problem):
            problem = replace(problem, prefetches_ahead=_PREFETCHES_AHEAD)
    return find(problem, policy="auto", seed=seed)


def _streams_state(problem: Problem) -> bool:
    """Whether what the step updates, such as weights and optimizer state, exceeds the budget by itself."""
    program = problem.memory.program
    written = {buffer for op in program.ops for buffer in op.writes if program.buffers[buffer].is_persistent}
    return sum(map(problem.nbytes, written)) > problem.budget_bytes


def _baselines(problem: Problem) -> list[_Policy]:
    policies: list[_Policy] = [find_swap]
    program = problem.memory.program
    if sum(buffer.nbytes for buffer in program.buffers if buffer.is_persistent) <= problem.budget_bytes:
        policies.append(find_recompute)  # moves none of them
    if len(program.ops) <= _MAX_OPS_FOR_BASELINES and not program.is_cyclic:  # they move activations only
        policies += [plan_swap_all, plan_tflms]
    return policies
