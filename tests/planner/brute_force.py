"""The best plan of a tiny step by trying all plans of a kind, with the simulator and the verifier alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from lmswap.analyze.memory import StepMemory
from lmswap.analyze.repeatable import repeatable_ops
from lmswap.errors import PlanInvalid
from lmswap.ir.plan import Plan, Recompute, Swap
from lmswap.ir.schedule import schedule
from lmswap.planner import simulate, verify
from tests.ir.build import build


@st.composite
def tight_steps(draw):
    """A chain of five ops, some of which read an earlier result too, and a budget that not all of them keep to."""
    lines = ["inference"]
    for op in range(5):
        earlier = (
            ["b0"]
            if op == 4
            else draw(st.lists(st.sampled_from([f"b{n}" for n in range(op - 1)] or ["x"]), max_size=1))
        )
        reads = [f"b{op - 1}" if op else "x", *earlier]
        mark = draw(st.sampled_from(["", "!random"]))
        lines.append(f"f{op} {draw(st.integers(0, 4))}{mark}: {' '.join(reads)} -> b{op}")
    sizes = {f"b{op}": draw(st.integers(1, 4)) for op in range(5)}
    step = build("\n".join(lines), sizes={"x": 0} | sizes)
    memory = StepMemory(step.program, step.costs)
    assume(memory.floor.max() < memory.curve.max())
    return step, draw(st.integers(int(memory.floor.max()), int(memory.curve.max()) - 1))


def optimum(step, machine, budget_bytes):
    """The least seconds of any plan with up to two recomputes and two swaps, by trying all; infinite if none fits."""
    program = step.program
    allowed = [
        Recompute(op.index, position)
        for op, is_repeatable in zip(program.ops, repeatable_ops(program), strict=True)
        for position in range(op.index + 1, len(program.ops))
        if is_repeatable and program.segment_of(op.index).can_pass_values_to(program.segment_of(position))
    ]
    allowed.sort(key=lambda recompute: recompute.position)
    choices = [chosen for count in range(3) for chosen in itertools.product(allowed, repeat=count)]
    in_order = [c for c in choices if all(a.position <= b.position for a, b in itertools.pairwise(c))]
    return min(
        (least_by_swapping(step, machine, budget_bytes, recomputes) for recomputes in in_order), default=math.inf
    )


def least_by_swapping(step, machine, budget_bytes, recomputes):
    """The least seconds with these recomputes: each gap swapped or not, released and swapped in at any position."""
    runs = schedule(step.program, recomputes)
    memory = StepMemory(runs.program, runs.costs(step.costs))
    least = math.inf
    for swaps in swap_sets(memory):
        plan = Plan("all", budget_bytes, swaps, 0.0, 0, {"host": 4096 * 100}, recomputes=recomputes)
        timeline = simulate(step.program, step.costs, machine, plan)
        if timeline.seconds < least and timeline.peak_bytes <= budget_bytes:
            try:
                verify(step.program, step.costs, machine, replace(plan, predicted_peak_bytes=timeline.peak_bytes))
            except PlanInvalid:
                continue
            least = timeline.seconds
    return least


def swap_sets(memory):
    """Up to two swaps in different gaps, at all positions; the copy out starts as early as it can."""
    gaps = []
    for buffer, found in memory.ranges.items():
        for after, before in itertools.pairwise(found.uses):
            if before > after + 1 and memory.program.buffers[buffer].is_swappable:
                written = max(write for write in found.writes if write <= after)
                gaps.append(
                    [
                        Swap(buffer, "host", 8192 * len(gaps), written + 1, release, back, before)
                        for release in range(after + 1, before)
                        for back in range(release + 1, before + 1)
                    ]
                )
    for count in range(3):
        for chosen in itertools.combinations(gaps, count):
            for swaps in itertools.product(*chosen):
                yield tuple(sorted(swaps, key=lambda swap: swap.first_use))
