"""The decisions of each policy on steps small enough for hand computation, and invariants of all on any step."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from benchmarks.programs.corpus import load_machine, load_program
from lmswap import planner
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.errors import OptionError, PlanInfeasible, TierError
from lmswap.ir.machine import Host
from lmswap.ir.plan import Decision
from lmswap.ir.schedule import schedule
from lmswap.options import Options
from lmswap.planner import POLICIES, _core, make_plan, portfolio, reprice, search, simulate, verify
from lmswap.planner.bound.certify import budget_lower_bound
from lmswap.planner.problem import Problem
from tests.ir.build import Step, build, unit_machine
from tests.ir.strategies import machines, steps
from tests.models import quick_of
from tests.planner.instances import INSTANCES, Instance
from tests.planner.plans import plan_of
from tests.planner.problems import problem_of

SEARCHES = ("auto", "swap", "recompute")  # what they find need not be the best there is

CHAIN = build(
    """
    forward
    f1 1: X -> a
    f2 1: a -> b
    f3 1: b -> c
    f4 1: c -> y
    backward
    g4 1: t c -> gc
    g3 1: b gc -> gb
    g2 1: a gb -> ga
    g1 1: ga -> gx
    """,
    sizes={"a": 2, "b": 2, "c": 2},
    outputs="y",
    tangents="t",
    gradients="gx",
)


def swaps_of(step, plan):
    names = step.program.buffer_names
    return [(names[s.buffer], s.out_start, s.release, s.in_start, s.first_use) for s in plan.swaps]


def peak_of(step):
    return StepMemory(step.program, step.costs).peak.nbytes


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_none_and_auto_keep_everything_if_it_fits():
    # g4: a b c 6, y t gc 3
    for policy in ("none", "auto", "swap", "recompute"):
        plan = plan_of(policy, CHAIN, 9)
        assert (plan.swaps, plan.predicted_seconds, plan.predicted_peak_bytes) == ((), 8.0, 9)
        assert plan.tier_bytes == {}


@pytest.mark.parametrize("policy", SEARCHES)
def test_at_the_peak_of_a_step_nothing_moves(policy):
    program, machine = load_program("unet3d_96"), load_machine("v100_gen3")
    costs = roofline(program, machine)
    peak_bytes = StepMemory(program, costs).peak.nbytes
    assert not plan_of(policy, Step(program, costs), peak_bytes, machine).moves


def test_swap_all_swaps_what_the_backward_reads():
    # At 8 bytes a second each way nothing waits: a leaves in [2, 2.25), is due back at 6 and starts one op ahead. b,
    # gone at 4 and due back at 5, is away for no op, but all means all.
    plan = plan_of("swap_all", CHAIN, 9, unit_machine(out=8, into=8))
    assert swaps_of(CHAIN, plan) == [("b", 3, 4, 4, 5), ("a", 2, 3, 5, 6)]
    assert plan.predicted_seconds == 8.0


def test_swap_all_does_not_depend_on_how_fast_the_link_is():
    for rate in (8, 1, 1 / 64):
        plan = plan_of("swap_all", CHAIN, 9, unit_machine(out=rate, into=rate))
        assert {name for name, *_ in swaps_of(CHAIN, plan)} == {"a", "b"}


def test_release_stalls_only_where_an_op_needs_the_memory():
    # At 1 byte a second a leaves in [2, 4). f4 has room for a b c y = 7: no wait at 3. g4 does not: a b c y t gc = 9.
    assert swaps_of(CHAIN, plan_of("tflms", CHAIN, 8))[0][:3] == ("a", 2, 4)
    # With 6 bytes already f4 must wait for a to leave.
    assert ("a", 2, 3) in [swap[:3] for swap in swaps_of(CHAIN, plan_of("swap_all", CHAIN, 6))]


def test_tflms_swaps_the_longest_edges_first():
    # Levels: f1 0 … f4 3, g4 4, g3 5, g2 6. a's far edge spans 6, b's 4, c's 2.
    assert [name for name, *_ in swaps_of(CHAIN, plan_of("tflms", CHAIN, 8))] == ["a"]
    assert [name for name, *_ in swaps_of(CHAIN, plan_of("tflms", CHAIN, 6))] == ["b", "a"]
    fast = unit_machine(out=8, into=8)
    assert swaps_of(CHAIN, plan_of("tflms", CHAIN, 9, fast, swapout_threshold=6)) == []
    assert [n for n, *_ in swaps_of(CHAIN, plan_of("tflms", CHAIN, 9, fast, swapout_threshold=5))] == ["a"]


def test_tflms_parameters_set_when_copies_in_start_and_which_ops_wait():
    fast = unit_machine(out=8, into=8)

    def a_swap(**parameters):
        return swaps_of(CHAIN, plan_of("tflms", CHAIN, 9, fast, swapout_threshold=5, **parameters))

    assert a_swap(swapin_ahead=1) == [("a", 2, 3, 5, 6)]
    assert a_swap(swapin_ahead=0) == [("a", 2, 3, 6, 6)]
    assert a_swap(swapin_ahead=2) == [("a", 2, 3, 4, 6)]
    assert a_swap(swapin_ahead=99) == [("a", 2, 3, 4, 6)]  # not before the segment that needs it
    assert a_swap(swapin_ahead=1, sync_mode=1) == [("a", 2, 2, 5, 6)]
    assert a_swap(swapin_ahead=1, sync_mode=2) == [("a", 2, 3, 5, 5)]
    assert a_swap(swapin_ahead=1, sync_mode=3) == [("a", 2, 2, 5, 5)]


def test_tflms_groups_near_consumers_into_one_copy_in():
    step = build(
        """
        inference
        f1 1: x -> a
        f2 1: a -> b
        f3 1: b -> c
        f4 1: c -> d
        f5 1: a d -> e
        f6 1: e -> f
        f7 1: a f -> y
        """,
        outputs="y",
    )
    given = {"swapout_threshold": 1, "swapin_ahead": 0}
    fast = unit_machine(out=8, into=8)
    # f5 and f7 are 2 levels apart. Nothing has written a since it was copied out, so that copy serves twice.
    apart = swaps_of(step, plan_of("tflms", step, 9, fast, swapin_groupby=2, **given))
    assert apart == [("a", 2, 3, 4, 4), ("a", None, 5, 6, 6)]
    together = swaps_of(step, plan_of("tflms", step, 9, fast, swapin_groupby=3, **given))
    assert together == [("a", 2, 3, 4, 4)]


def test_gaps_within_a_pass_are_used_only_if_the_budget_requires_it():
    # A U-Net's skip: s waits while the path below runs. f2 … f4 hold s beside 2 × 3 bytes.
    step = build(
        """
        inference
        f1 1: x -> s
        f2 1: s -> m
        f3 4: m -> n
        f4 4: n -> k
        f5 1: s k -> y
        """,
        sizes={"s": 2, "m": 3, "n": 3, "k": 3},
        outputs="y",
    )
    assert swaps_of(step, plan_of("swap_all", step, 8)) == []
    for policy in ("swap_all", "tflms"):
        # m n (6) leave no room for s: f3 waits for its copy, [2, 4). f4 neither: s is back in [12, 14).
        plan = plan_of(policy, step, 7)
        assert swaps_of(step, plan) == [("s", 2, 2, 4, 4)]
        assert plan.predicted_seconds == 15.0


def test_of_the_gaps_that_cover_the_worst_op_the_best_hidden_one_is_used():
    step = build(
        """
        inference
        f1 1: x -> a
        f2 1: a -> b
        f3 5: b -> c
        f4 1: c -> d
        f5 1: a b d -> e
        f6 50: e -> f
        f7 1: c f -> y
        """,
        scratch={"f4": 6},
        outputs="y",
    )
    # f4 has a b c d and 6 of scratch. a is idle for f3 and f4, 6 s; b for f4 only; c, for 51 s, but not in f4.
    assert [name for name, *_ in swaps_of(step, plan_of("swap_all", step, 9))] == ["a"]


def test_a_buffer_that_was_written_again_is_copied_out_again():
    text = """
        inference
        f1 1: x -> a
        f2 1: x -> b
        f3 1: b -> c
        f4 1: a c -> {wrote}
        f5 1: d -> e
        f6 1: e -> f
        f7 1: a f -> y
    """
    sizes = {"a": 4, "b": 4, "c": 4, "d": 3, "e": 5, "f": 3}
    read = build(text.format(wrote="d"), sizes=sizes, outputs="y")
    written = build(text.format(wrote="d a"), sizes=sizes, outputs="y")
    # f3 (b c) and f5, f6 (d e, e f) leave no room for a; f4 (a c d) needs 11.
    assert swaps_of(read, plan_of("swap_all", read, 11)) == [("a", 1, 2, 3, 3), ("a", None, 4, 6, 6)]
    assert swaps_of(written, plan_of("swap_all", written, 11)) == [("a", 1, 2, 3, 3), ("a", 4, 4, 6, 6)]


def test_infeasible_names_the_smallest_budget_the_op_and_live_buffers():
    with pytest.raises(PlanInfeasible) as found:
        plan_of("swap_all", CHAIN, 5)
    # g3 b gc → gb: 2 + 1 + 1 with y and t. Smaller it cannot be.
    assert found.value.needed_bytes == 6
    assert found.value.where == "op 5 'g3' (test.py:6 g3)"
    assert found.value.live == (("b", 2), ("y", 1), ("t", 1), ("gc", 1), ("gb", 1))
    plan_of("swap_all", CHAIN, found.value.needed_bytes)


def test_a_tier_that_is_too_small_is_an_error():
    with pytest.raises(TierError, match=r"8\.00 KiB on tier 'host', which has 4\.00 KiB"):
        plan_of("swap_all", CHAIN, 6, unit_machine(capacity=4096))


@pytest.mark.parametrize("policy", ["swap", "auto"])
def test_a_slow_host_prefers_one_large_copy_to_many_small_ones(policy):
    step = build(
        """
        inference
        f1 1: x -> a b c d e
        f2 20: x -> y
        f3 20: y -> z
        f4 1: a b c d e z -> w
        """,
        sizes={"a": 5},
        scratch={"f3": 4},
    )
    ops = tuple(replace(op, is_repeatable=False) for op in step.program.ops)
    step = replace(step, program=replace(step.program, ops=ops))
    fast = plan_of(policy, step, peak_of(step) - 4)
    assert [swap.buffer for swap in fast.swaps] == [step.id(name) for name in "bcde"]
    slow = plan_of(policy, step, peak_of(step) - 4, replace(unit_machine(), host=Host(0.0, 10.0)))
    assert [swap.buffer for swap in slow.swaps] == [step.id("a")]
    assert slow.predicted_seconds == 1 + 20 + 5 + 20 + 5 + 1  # queued at 10 and 20, before f3 and f4 begin


def test_small_buffers_are_kept():
    with pytest.raises(PlanInfeasible):
        plan_of("swap", CHAIN, 8, min_swap_bytes=3)


def test_bad_requests_are_refused():
    with pytest.raises(
        OptionError, match="unknown policy 'lru'; known are auto, none, swap, recompute, swap_all, tflms"
    ):
        plan_of("lru", CHAIN, 9)
    with pytest.raises(OptionError, match="no tier 'tape'"):
        plan_of("none", CHAIN, 9, tier="tape")
    with pytest.raises(OptionError, match="'tflms' has no parameter 'lb'; it has swapout_threshold"):
        plan_of("tflms", CHAIN, 9, lb=1)
    with pytest.raises(OptionError, match="'none' has no parameter 'swapin_ahead'; it has none"):
        plan_of("none", CHAIN, 9, swapin_ahead=1)
    for parameters in ({"swapin_ahead": -2}, {"swapin_groupby": 0}, {"sync_mode": 4}, {"swapout_threshold": -2}):
        with pytest.raises(OptionError, match=next(iter(parameters))):
            plan_of("tflms", CHAIN, 9, **parameters)
    short = replace(CHAIN.costs, seconds=CHAIN.costs.seconds[1:])
    with pytest.raises(OptionError, match="7 ops"):
        plan_of("none", replace(CHAIN, costs=short), 9)


def test_every_buffer_has_a_reason_in_numbers():
    plan = plan_of("tflms", CHAIN, 7, min_swap_bytes=2)
    assert schedule(CHAIN.program, ()).decisions(plan)[CHAIN.id("a")] is Decision.SWAP
    # f2 ends at 2; f3, f4, g4 and g3 run until 6; there is room for a's return only then, and g2 starts at 8.
    reasons = {CHAIN.program.buffer_names[buffer]: reason for buffer, reason in plan.reasons.items()}
    assert reasons["a"] == (
        "swap: 2 B idle 6000.0 ms, copy 2000.0 ms out and 2000.0 ms in, compute waits 2000.0 ms; recompute would cost "
        "1000.0 ms"
    )
    assert reasons["b"] == "keep: 2 B fits the budget"
    assert reasons["c"] == "keep: never idle between its uses"
    assert reasons["y"] == "keep: shares memory with an output"
    assert reasons["t"] == "keep: a tangent, the caller holds it"
    assert reasons["gx"] == "keep: a gradient, it is returned"
    assert set(plan.reasons) == {buffer.id for buffer in CHAIN.program.buffers}


def test_a_swaps_reason_names_the_writable_input_that_bars_recompute():
    text = "forward\nf1 1: x -> a\nf2 1: a -> b\nf3 1: b -> y\nbackward\ng1 1: t a -> gx"
    step = build(text, sizes={"a": 4}, scratch={"f3": 10}, outputs="y", tangents="t", gradients="gx")
    plan = plan_of("swap", step, 12)
    assert plan.reasons[step.id("a")].endswith("it cannot be recomputed, as the caller may write 'x' before")


# --- instances with a known optimum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_auto_reaches_the_optimum(instance: Instance):
    plan = plan_of("auto", instance.step, instance.budget_bytes, instance.machine)
    optimum_seconds = instance.swap_seconds if instance.optimum_seconds is None else instance.optimum_seconds
    assert plan.predicted_seconds == optimum_seconds


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda instance: instance.name)
def test_swap_alone_reaches_the_optimum_of_swapping(instance: Instance):
    plan = plan_of("swap", instance.step, instance.budget_bytes, instance.machine)
    assert (plan.predicted_seconds, plan.recomputes) == (instance.swap_seconds, ())


def test_three_live_bytes_do_not_fit_into_two():
    with pytest.raises(PlanInfeasible) as found:
        plan_of("auto", INSTANCES[0].step, 2)
    assert found.value.needed_bytes == 3


def test_recomputed_copies_keep_their_ids_without_small_buffers(monkeypatch):
    step = build(
        """
        forward
        f1 1: x -> s a
        f2 1: s a -> y
        backward
        g2 1: t -> gy
        g1 1: a gy -> gx
        """,
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    small, large = (step.program.buffer_names.index(name) for name in "sa")
    first = SimpleNamespace(version=len(step.program.buffers), out_start=3, release=3, in_start=3, first_use=4)
    found = SimpleNamespace(recomputes=[(0, 2)], swaps=[first])
    problem = problem_of(step, 9)
    monkeypatch.setattr(search, "build_plan", lambda problem, policy, swaps, recomputes: (swaps, recomputes))
    for left_out, expected in ((frozenset(), small), (frozenset({small}), large)):
        (swap,), recomputes = search.Found(problem, "search", found, left_out).plan()
        assert schedule(step.program, recomputes).buffers[swap.buffer] == expected


@pytest.mark.parametrize("find_min_budget", [False, True])
def test_the_needed_budget_is_searched_for_only_on_request(find_min_budget, monkeypatch):
    budgets, targets = [], []

    def find(step, link, limits, *, target_seconds, **_):
        budgets.append(limits.budget_bytes)
        targets.append(target_seconds)
        return SimpleNamespace(fits=limits.budget_bytes >= 6, excess_bytes=1, worst_op=0)

    given = dict.fromkeys(("Step", "Link", "Limits", "Prices"), SimpleNamespace)
    monkeypatch.setattr(search, "_core", SimpleNamespace(search=find, **given))
    with pytest.raises(PlanInfeasible) as refusal:
        search.find(problem_of(CHAIN, 3, find_min_budget=find_min_budget), policy="search")
    assert budgets == ([3, 4, 5, 6] if find_min_budget else [3])
    assert targets == [0.0, inf, inf, inf][: len(budgets)]  # any plan shows that a budget suffices
    assert refusal.value.needed_bytes == budgets[-1] + (not find_min_budget)


def test_no_other_policy_is_tried_below_the_proven_minimum(monkeypatch):
    def try_other(problem):
        raise AssertionError

    monkeypatch.setattr(portfolio, "_baselines", lambda problem: [try_other])
    with pytest.raises(PlanInfeasible) as refusal:
        plan_of("auto", CHAIN, 2)
    problem = problem_of(CHAIN, 2)
    assert refusal.value.needed_bytes == budget_lower_bound(problem.memory, problem.link, problem.min_swap_bytes)[0]


def test_no_search_below_the_proven_minimum(monkeypatch):
    budgets, limits = [], search._limits

    def note(problem, *, budget_bytes=None, **options):
        budgets.append(budget_bytes)
        return limits(problem, budget_bytes=budget_bytes, **options)

    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(search, "_limits", note)
    with pytest.raises(PlanInfeasible) as refusal:
        plan_of("auto", CHAIN, 2)
    problem = problem_of(CHAIN, 2)
    min_resident_bytes, op = budget_lower_bound(problem.memory, problem.link, problem.min_swap_bytes)
    assert min(filter(None, budgets)) == min_resident_bytes == refusal.value.needed_bytes
    assert f"op {op} " in refusal.value.where


@pytest.mark.parametrize(
    ("bound_seconds", "expected"),
    [(10.0, {1, 2}), (9.95, {1, 2, "other"}), (9.0, {1, 2, 3, "other"})],
)
def test_auto_tries_more_the_further_it_is_from_the_bound(bound_seconds, expected, monkeypatch):
    found = replace(plan_of("swap", CHAIN, 9), policy="auto", predicted_seconds=10.0)
    tried = set()

    def try_search(problem, *, seed, **_):
        tried.add(seed)
        return found

    def try_other(problem):
        tried.add("other")
        raise TierError("full")

    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "find", try_search)
    monkeypatch.setattr(portfolio, "_baselines", lambda problem: [try_other])
    assert portfolio.plan_auto(problem_of(CHAIN, 5, target_seconds=bound_seconds)).policy == "auto"
    assert tried == expected


def test_auto_completes_only_the_plan_that_it_takes(monkeypatch):
    completed = []
    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "as_plan", lambda found: completed.append(found) or search.as_plan(found))
    assert portfolio.plan_auto(problem_of(CHAIN, 7)) is not None
    assert len(completed) == 1


def test_auto_takes_the_next_plan_where_the_tier_is_too_small_for_the_fastest(monkeypatch):
    slower = replace(plan_of("swap", CHAIN, 9), policy="auto", predicted_seconds=10.0)

    class TooLarge(search.Found):
        predicted_seconds = 9.0

        def plan(self):
            raise TierError("full")

    def try_search(problem, *, seed, **_):
        return TooLarge(problem, "auto", None) if seed == 1 else slower

    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "find", try_search)
    assert portfolio.plan_auto(problem_of(CHAIN, 5, target_seconds=9.0)) == slower


def test_no_garbage_is_collected_while_a_plan_is_made(monkeypatch):
    is_enabled = []
    monkeypatch.setattr(planner, "check", lambda *_, **__: is_enabled.append(gc.isenabled()))
    plan_of("auto", CHAIN, 7)
    assert is_enabled == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("cheapest", ["auto", "tflms"])
def test_errors_of_auto_name_auto(cheapest, monkeypatch):
    def refuse(problem, policy, **_):
        raise PlanInfeasible(budget_bytes=5, needed_bytes=6 + (policy != cheapest), where="op 0", policy=policy)

    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "find", refuse)
    monkeypatch.setattr(portfolio, "_baselines", lambda problem: [partial(refuse, policy="tflms")])
    with pytest.raises(PlanInfeasible, match="policy 'auto' cannot fit") as refusal:
        portfolio.plan_auto(problem_of(CHAIN, 5))
    assert (refusal.value.policy, refusal.value.needed_bytes) == ("auto", 6)


@pytest.mark.parametrize("budget_bytes", [2, 6])
def test_each_thread_of_auto_releases_its_memory_once(budget_bytes, monkeypatch):
    released = []
    monkeypatch.setattr(portfolio, "plan_exactly", lambda *_, **__: None)
    monkeypatch.setattr(portfolio, "release_thread_memory", lambda: released.append(threading.get_ident()))
    with pytest.raises(PlanInfeasible) if budget_bytes == 2 else nullcontext():
        portfolio.plan_auto(problem_of(CHAIN, budget_bytes))
    assert len(released) == len(set(released)) == portfolio._NUM_THREADS
    assert threading.get_ident() not in released


# --- any step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", quick_of(POLICIES, ["auto", "swap"]))
@given(data=st.data(), step=steps(), machine=machines())
def test_plans_fit_the_budget_and_pass_the_verifier(policy, data, step, machine):
    memory = StepMemory(step.program, step.costs)
    budget_bytes = data.draw(st.integers(0, memory.peak.nbytes + 1), label="budget")
    try:
        plan = plan_of(policy, step, budget_bytes, machine, min_swap_bytes=data.draw(st.sampled_from([1, 2, 5000])))
    except PlanInfeasible as refusal:
        assert refusal.needed_bytes > budget_bytes
        return
    assert budget_bytes >= int(memory.floor.max())
    timeline = simulate(step.program, step.costs, machine, plan)
    assert timeline.peak_bytes == plan.predicted_peak_bytes <= budget_bytes
    assert timeline.seconds == plan.predicted_seconds >= sum(step.costs.seconds) * (1 - 1e-12)
    verify(step.program, step.costs, machine, plan)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["swap_all", "auto"])
@given(data=st.data(), step=steps(), machine=machines(), other=machines())
def test_a_repriced_plan_differs_in_its_figures_only(policy, data, step, machine, other):
    budget_bytes = data.draw(st.integers(0, peak_of(step)), label="budget")
    try:
        plan = plan_of(policy, step, budget_bytes, machine)
    except PlanInfeasible:
        return
    limits = {"tier": "host", "min_swap_bytes": 1}
    assert reprice(plan, step.program, step.costs, machine, **limits) == plan
    costs = replace(step.costs, seconds=tuple(3 * seconds for seconds in step.costs.seconds))
    priced = reprice(plan, step.program, costs, other, **limits)
    assert (priced.swaps, priced.recomputes, priced.policy) == (plan.swaps, plan.recomputes, plan.policy)
    assert priced.predicted_seconds == simulate(step.program, costs, other, plan).seconds
    assert sum(costs.seconds) * (1 - 1e-12) <= priced.certificate.seconds <= priced.predicted_seconds


def test_repricing_raises_the_budget_to_the_new_peak():
    plan = plan_of("swap", CHAIN, 8)
    costs = replace(CHAIN.costs, scratch_bytes=(0, 0, 0, 9, 0, 0, 0, 0))
    priced = reprice(plan, CHAIN.program, costs, unit_machine(), tier="host", min_swap_bytes=1)
    assert priced.budget_bytes == priced.predicted_peak_bytes > plan.budget_bytes
    assert (priced.swaps, priced.recomputes) == (plan.swaps, plan.recomputes)
    cheaper = reprice(priced, CHAIN.program, CHAIN.costs, unit_machine(), tier="host", min_swap_bytes=1)
    assert cheaper.predicted_peak_bytes <= 8


@pytest.mark.slow
@pytest.mark.parametrize("policy", SEARCHES)
@given(step=steps(), machine=machines())
def test_the_budget_that_a_search_names_is_feasible(policy, step, machine):
    with pytest.raises(PlanInfeasible) as found:
        plan_of(policy, step, -1, machine)
    needed_bytes = found.value.needed_bytes
    assert plan_of(policy, step, needed_bytes, machine).predicted_peak_bytes <= needed_bytes
    assert needed_bytes >= int(StepMemory(step.program, step.costs).floor.max())


@pytest.mark.parametrize("policy", quick_of((name for name in POLICIES if name not in SEARCHES), ["tflms"]))
@given(step=steps(), machine=machines())
def test_the_smallest_budget_that_is_named_is_feasible_and_the_smallest(policy, step, machine):
    with pytest.raises(PlanInfeasible) as found:
        plan_of(policy, step, -1, machine)
    needed_bytes = found.value.needed_bytes
    assert plan_of(policy, step, needed_bytes, machine).predicted_peak_bytes == needed_bytes
    with pytest.raises(PlanInfeasible) as found:
        plan_of(policy, step, needed_bytes - 1, machine)
    assert found.value.needed_bytes == needed_bytes


@given(data=st.data(), step=steps(max_ops=9), machine=machines())
def test_no_policy_is_faster_than_auto(data, step, machine):
    # With less than its largest op nothing fits, and refusals take longest.
    largest_op = int(StepMemory(step.program, step.costs).floor.max())
    budget_bytes = data.draw(st.integers(largest_op, peak_of(step)), label="budget")
    seconds = {}
    for policy in POLICIES:
        try:
            seconds[policy] = plan_of(policy, step, budget_bytes, machine).predicted_seconds
        except PlanInfeasible:
            continue
    assume(seconds)
    assert seconds["auto"] <= min(seconds.values()) * (1 + 1e-12)  # the same seconds, summed in another order


@pytest.mark.slow
@given(data=st.data(), step=steps(max_ops=6), machine=machines())
def test_more_budget_is_never_slower(data, step, machine):
    budget_bytes = data.draw(st.integers(0, peak_of(step)), label="budget")
    try:
        tight = plan_of("auto", step, budget_bytes, machine)
    except PlanInfeasible as refusal:
        budget_bytes = refusal.needed_bytes
        tight = plan_of("auto", step, budget_bytes, machine)
    roomy = plan_of("auto", step, budget_bytes + data.draw(st.integers(1, 5000), label="more"), machine)
    assert roomy.predicted_seconds <= tight.predicted_seconds * (1 + 1e-12)


@given(step=steps(), machine=machines())
def test_a_budget_that_fits_everything_costs_nothing(step, machine):
    plan = plan_of("auto", step, peak_of(step), machine)
    assert plan.swaps == ()
    host_seconds = machine.host.seconds(len(step.costs.seconds), 0) if machine.host else 0.0
    none_seconds = plan_of("none", step, peak_of(step), machine).predicted_seconds
    assert plan.predicted_seconds == none_seconds >= max(host_seconds, sum(step.costs.seconds)) * (1 - 1e-12)
    assert machine.host or none_seconds == pytest.approx(sum(step.costs.seconds))


OUT_IN_BACKWARD = build(
    """
    forward
    f1 1!random: X -> a
    f2 1: a -> y
    backward
    g3 4: t -> b
    g2 1: b -> m gm
    g1 9: gm -> n
    g0 1: n a -> gx
    """,
    sizes={"X": 0, "a": 4, "y": 0, "t": 0, "b": 1, "m": 4, "gm": 1, "n": 1, "gx": 1},
    outputs="y",
    tangents="t",
    gradients="gx",
)


@pytest.mark.parametrize("find", [search.plan_exactly, search.find])
def test_copies_out_go_on_while_the_backward_begins_and_stall_nothing(find):
    # a, 4 bytes, is idle from 2 on, leaves in 4 s, and obstructs no other buffer before g2, which begins at 6.
    problem = problem_of(OUT_IN_BACKWARD, 7)
    plan = search.as_plan(find(problem, policy="swap", may_recompute=False))
    (swap,) = plan.swaps
    assert OUT_IN_BACKWARD.program.segments[0].stop < swap.release <= 3
    assert plan.predicted_seconds == sum(OUT_IN_BACKWARD.costs.seconds)


@pytest.mark.parametrize("policy", ["checkpoint", "memory_budget"])
def test_a_removed_policy_is_refused_with_what_to_use_instead(policy):
    for refuse in (partial(plan_of, policy, CHAIN, 8), partial(Options.parse, policy=policy)):
        with pytest.raises(OptionError, match=f"policy '{policy}' has been removed; use 'auto', or 'recompute'"):
            refuse()


def test_a_refusal_takes_a_short_search_and_names_a_budget_near_the_least_that_serves_at_once(monkeypatch):
    program, machine = load_program("unet3d_96"), load_machine("v100_gen3")
    memory, tier, num_evaluations = StepMemory(program, roofline(program, machine)), machine.tiers[0], []
    least = budget_lower_bound(memory, tier.link.while_busy, 2**20)
    problem = Problem(memory, machine, tier, 200_000_000, 2**20, min_budget=least)

    def count(*args, **kwargs):
        found = _core.search(*args, **kwargs)
        num_evaluations.append(found.evaluations)
        return found

    monkeypatch.setattr(search, "_core", SimpleNamespace(**{**vars(_core), "search": count}))
    with pytest.raises(PlanInfeasible) as refusal:
        search.find(problem, policy="auto")
    assert sum(num_evaluations) < search._max_evaluations(problem) / 10
    assert least[0] < refusal.value.needed_bytes <= 1.011 * least[0]
    num_evaluations.clear()
    search.find(replace(problem, budget_bytes=refusal.value.needed_bytes, target_seconds=inf), policy="auto").plan()
    assert len(num_evaluations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["h200_gen5", "v100_gen3"])
def test_what_recompute_can_fit_does_not_depend_on_the_machine(machine):
    program, machine = load_program("unet3d_96"), load_machine(machine)
    costs = roofline(program, machine)

    def plan(budget_bytes):
        limits = {"budget_bytes": budget_bytes, "tier": machine.tiers[0].name, "min_swap_bytes": 2**20}
        return make_plan("recompute", program, costs, machine, **limits)

    assert plan(417_160_195).predicted_peak_bytes <= 417_160_195  # a search of one machine finds no plan here
    with pytest.raises(PlanInfeasible) as refusal:
        plan(380_000_000)
    assert refusal.value.needed_bytes < 400_000_000
    assert plan(refusal.value.needed_bytes).predicted_peak_bytes <= refusal.value.needed_bytes
