"""PyTorch's memory budget over a program: kept and recomputed buffers, by hand and by torch's own solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

from benchmarks.baselines import plan_baseline
from benchmarks.baselines.memory_budget import _Knapsack
from lmswap.errors import PlanInfeasible
from tests.ir.build import build, unit_machine

CHAIN = build(
    """
    forward
    f1 1: X -> a
    f2 3: a -> b
    f3 1: b -> c
    f4 1: c -> y
    backward
    g4 1: t c -> gc
    g3 1: b gc -> gb
    g2 1: a gb -> ga
    g1 1: ga -> gx
    """,
    sizes={"a": 4, "b": 4, "c": 4},
    outputs="y",
    tangents="t",
    gradients="gx",
)


def plan_of(step, budget_bytes):
    limits = {"budget_bytes": budget_bytes, "tier": "host", "min_swap_bytes": 1}
    return plan_baseline("memory_budget", step.program, step.costs, unit_machine(), **limits)


def recomputes_of(step, budget_bytes):
    ops = step.program.ops
    return [
        (ops[recompute.op].name, ops[recompute.position].name) for recompute in plan_of(step, budget_bytes).recomputes
    ]


def test_the_values_that_are_dearest_to_recompute_are_kept():
    # g4: a b c y t gc 15. For two of three values there is room at 14/20; b takes 3 s, of a and c, 1 s, one goes.
    assert recomputes_of(CHAIN, 15) == []
    assert recomputes_of(CHAIN, 14) == recomputes_of(CHAIN, 11) == [("f1", "g2")]
    plan = plan_of(CHAIN, 14)
    assert (plan.swaps, plan.predicted_peak_bytes, plan.predicted_seconds) == ((), 11, 11.0)


def test_infeasible_states_what_would_fit():
    # b alone does not help: g4 has c again, and then b c y t gc. With none kept a b c are all recomputed before g4.
    with pytest.raises(PlanInfeasible) as found:
        plan_of(CHAIN, 10)
    assert (found.value.needed_bytes, found.value.where) == (11, "op 4 'g4' (test.py:5 g4)")
    assert ("c", 4) in found.value.live


@pytest.mark.parametrize(("middle", "again"), [("1", ["f1", "f2", "f3"]), ("1!random", ["f3"])])
def test_missing_inputs_are_recomputed_first(middle, again):
    step = build(
        f"""
        forward
        f1 1: X -> a
        f2 {middle}: a -> m
        f3 1: m -> c
        f4 1: c -> d
        f5 1: d -> y
        backward
        g5 1: t -> gd
        g4 1: c gd -> gx
        """,
        sizes={"a": 8, "m": 8, "c": 9},
        scratch={"f5": 20},
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    # f5: c d y 11 and 20 of scratch; without c 22, or 30 where m, which cannot be recomputed, waits for f3.
    assert recomputes_of(step, 30) == [(name, "g4") for name in again]


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 20),
)
def test_kept_tensors_are_worth_as_much_as_those_that_torch_keeps(values, twentieths):
    parts, worths = (np.array(each) for each in zip(*values, strict=True))
    capacity = 10_000 * twentieths // 20
    kept = _Knapsack(range(len(values)), parts, [float(worth) for worth in worths]).best(capacity)
    most, _, _ = dp_knapsack(list(parts / 10_000), [float(worth) for worth in worths], capacity / 10_000)
    assert parts[kept].sum() <= capacity
    assert worths[kept].sum() == most
