"""State of an enabled model: cached plans, calibration, host budget, room for other memory."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.errors import LmswapError
from lmswap.hardware import measure
from lmswap.hardware.cache import cache_directory
from lmswap.ir.schedule import schedule
from lmswap.options import Options
from lmswap.planner import _POLICIES, calibrate, import_search, make_plan, simulate
from lmswap.planner.baselines import plan_swap_all
from lmswap.planner.bound.certify import certify
from lmswap.planner.portfolio import plan_auto
from lmswap.runtime import _C
from lmswap.session import allowance, planner, replan, replan_triggers
from lmswap.session.allowance import Allowance
from lmswap.session.budget import BudgetTracker
from lmswap.session.diagnostics import Notes
from lmswap.session.planned_step import Phase
from lmswap.training_state.optimizer_memory import TrainableParameters
from tests.ir.build import build
from tests.models import LARGE, Case, tight_budget
from tests.session.training import CASE, SMALL, train
from tests.training import same_bits
from tests.training_state.no_weights import no_weights


def plan_files() -> list[Path]:
    return sorted(cache_directory().glob("plan-*.json"))


def refuse(*_, **__):
    raise AssertionError("this start had nothing left to do")


def test_a_second_start_neither_times_ops_nor_plans(monkeypatch):
    train(policy="none")  # a process finds 30 to 45 MiB more in use at its first trace, which imports much of torch
    expected, first = train()
    assert first.plan_origin.startswith("made in")
    monkeypatch.setattr("lmswap.session.planner.make_plan", refuse)
    monkeypatch.setattr("lmswap.capture.op_costs.benchmark.OpProfiler.costs", refuse)
    actual, second = train()
    assert same_bits(actual, expected)
    assert second.plan_origin == "from cache"
    assert "Plan: from cache" in str(second)
    timeless = [[replace(made, resident=()) for made in report.decisions] for report in (first, second)]
    assert timeless[0] == timeless[1]
    assert second.bound_seconds == first.bound_seconds
    assert {path.stat().st_mode & 0o777 for path in plan_files()} == {0o600}


def test_a_start_that_times_no_ops_reserves_what_their_first_runs_leave(monkeypatch):
    timed, nbytes = OpProfiler.costs, 4 * 2**20
    monkeypatch.setattr(OpProfiler, "costs", lambda *args: replace(timed(*args), first_run_bytes=nbytes))
    (_, first), (_, second) = train(), train()
    assert second.reserve_bytes == first.reserve_bytes + nbytes


@pytest.mark.parametrize(
    "changed",
    [
        {"policy": "tflms"},
        pytest.param({"min_swap_bytes": 2 * SMALL}, marks=pytest.mark.slow),
        pytest.param({"budget": "1GiB"}, marks=pytest.mark.slow),
    ],
)
def test_other_options_have_their_own_plans(changed):
    train()
    assert train(**changed)[1].plan_origin.startswith("made in")


def test_other_shapes_have_their_own_plans():
    train()
    other = Case(CASE.make, lambda: torch.randn(2, 3, 64, 64))
    assert train(other)[1].plan_origin.startswith("made in")


def damages():
    def cut(data):
        del data["plan"]["swaps"][0]["offset"]

    def outlive(data):
        data["plan"]["swaps"][0]["first_use"] += 1  # the next use finds the buffer away, or the tie is broken

    def boast(data):
        data["plan"]["certificate"]["seconds"] = 1e6

    def shorten(data):
        data["costs"]["seconds"].pop()

    def misnumber(data):
        data["plan"]["swaps"][0]["buffer"] = -3

    return [cut, outlive, boast, shorten, misnumber]


@pytest.mark.parametrize(
    "damage", [pytest.param(damage, marks=[pytest.mark.slow] * (number > 0)) for number, damage in enumerate(damages())]
)
def test_damaged_cached_plan_is_replaced(damage, caplog):
    expected, _ = train()
    (path,) = plan_files()
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    actual, report = train()
    assert same_bits(actual, expected)
    assert report.plan_origin.startswith("made in")
    assert "cannot be used, planning again" in caplog.text
    assert train()[1].plan_origin == "from cache"


def test_without_a_cache_directory_nothing_is_cached(monkeypatch, device, tier):
    machine = measure.describe_machine(torch.empty(0).device, tier)
    monkeypatch.setattr(measure, "_measure_machine", lambda *_: machine)
    monkeypatch.setenv("LMSWAP_CACHE_DIR", "")
    train()
    assert train()[1].plan_origin.startswith("made in")


def test_prediction_that_is_off_is_replanned_once_by_measurements(monkeypatch):
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    expected, _ = train(num_steps=6)
    monkeypatch.setattr(calibrate, "TOLERANCE", -1.0)
    for path in plan_files():
        path.unlink()
    actual, report = train(num_steps=6)
    assert same_bits(actual, expected)
    (note,) = [note for note in report.plan_notes if "replanned" in note]
    assert note.startswith("replanned after step 3: measured ")
    # A clone that torch inserts has no line of the user's; on a busy machine it may be the one.
    op = r"'clone_default'|'\S+' \(models\.py:\d+ .*\)"
    assert re.search(rf"predicted; most off is op (?:{op}): [^ ]+ \S+ against ", note)
    assert report.plan_origin == "replanned after step 3"
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    assert train(num_steps=3)[1].predicted_seconds == pytest.approx(report.predicted_seconds)  # remembered


@pytest.mark.slow
def test_a_kept_plan_is_predicted_with_measured_costs(monkeypatch):
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    learnt = []

    def compare(program, costs, machine, plan, **measured):
        found = calibrate.calibrate(program, costs, machine, plan, **measured)
        costs = replace(found.costs, seconds=tuple(7.0 + seconds for seconds in found.costs.seconds))
        learnt.append((program, replace(found, costs=costs), plan))
        return replace(found, costs=costs)

    monkeypatch.setattr(replan, "calibrate", compare)
    tight = {"policy": "swap_all", "budget": tight_budget(train(LARGE, policy="none")[1], 0.9)}
    learnt.clear()
    _, report = train(LARGE, num_steps=5, **tight)
    ((program, found, plan),) = learnt
    seconds = simulate(program, found.costs, found.machine, plan).seconds
    assert report.predicted_seconds == pytest.approx(seconds) == pytest.approx(report.predicted.seconds)
    assert sum(found.costs.seconds) <= report.bound_seconds <= seconds
    assert report.plan_origin.startswith("made in")
    assert not any("replanned" in note for note in report.plan_notes)
    assert train(LARGE, num_steps=3, **tight)[1].predicted_seconds == pytest.approx(seconds)  # remembered


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.cpu_only("no heap of lmswap's serves a GPU's memory")
def test_planning_between_steps_takes_free_heap_memory_only_as_needed(monkeypatch):
    import_search()  # the first search of a process does, and gives all free memory back for it
    monkeypatch.setattr(calibrate, "TOLERANCE", -1.0)
    monkeypatch.setattr(planner, "_PLANNING_BYTES", 2**23)
    monkeypatch.setattr(planner, "_PLANNING_BYTES_PER_OP", 0)
    counted, apply = [], replan.Replanner.apply

    def count(replanner, run, released):
        before, before_bytes = _C.heap_stats(), _C.heap_reusable_bytes()
        is_another = apply(replanner, run, released)
        if replanner._plans[run.graphs].history.phase is not Phase.CALIBRATED:
            return is_another
        after = _C.heap_stats()
        counted.append(
            (
                4096 * (after.num_fresh_pages - before.num_fresh_pages),
                before_bytes - _C.heap_reusable_bytes(),
                before.retained_bytes - after.retained_bytes,
            )
        )
        return is_another

    monkeypatch.setattr(replan.Replanner, "apply", count)
    train(LARGE, num_steps=4, policy="none")
    ((fresh_bytes, lent_bytes, dropped_bytes),) = counted
    assert 2**23 <= fresh_bytes < 2**23 + 2**21  # in whole huge pages
    assert 0 < lent_bytes <= fresh_bytes
    assert dropped_bytes == 0


class Wide(nn.Module):
    """Its parameters, and so its gradients, have 16 MiB; a step holds some 30 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)).exp()
        return x


WIDE = Case(Wide, lambda: torch.randn(1024, 1024))


def test_tensors_held_by_others_meanwhile_count_as_before_the_step():
    torch.manual_seed(0)
    model = lmswap.enable(WIDE.make(), policy="swap_all", min_swap_bytes=SMALL)
    held = []
    for _ in range(4):
        WIDE.loss(model(WIDE.batch())).backward()
        held.append(torch.ones(16 * 2**20))  # 64 MiB; 32 MiB of them are in reserve for an optimizer
    assert lmswap.report(model).base_bytes > 2 * 64 * 2**20
    lmswap.disable(model)


def test_an_evaluation_before_training_keeps_the_optimizer_reserve(device):
    model = lmswap.enable(CASE.make(), policy="none")
    with torch.no_grad():
        model(CASE.batch())
    CASE.loss(model(CASE.batch())).backward()
    trainable_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert lmswap.report(model).reserve_bytes == (2 if device.type == "cpu" else 3) * trainable_bytes
    lmswap.disable(model)


def test_the_host_budget_limits_swapped_bytes_before_the_first_step(tier):
    _, unlimited = train()
    assert unlimited.tier_planned_bytes > 2**19
    with pytest.raises(LmswapError, match=f"tier '{tier}'"):
        train(host_budget="512KiB")
    _, limited = train(host_budget=2 * unlimited.tier_planned_bytes)
    assert limited.tier_peak_bytes <= limited.tier_planned_bytes <= limited.host_budget_bytes
    assert "Host budget" in str(limited)


def reports_of_growth(nbytes: int, resident, *, after_step: int = 1, **options):
    """Of a model after its first step and after its fifth; from ``after_step`` on the process holds ``nbytes`` more."""
    torch.compiler.reset()
    model = lmswap.enable(CASE.make(), "4GiB", **options)
    CASE.loss(model(CASE.batch())).backward()
    planned = lmswap.report(model)
    for step in range(1, 5):
        if step == after_step:
            resident.other_bytes += nbytes
        CASE.loss(model(CASE.batch())).backward()
    steady = lmswap.report(model)
    lmswap.disable(model)
    return planned, steady


grows = pytest.mark.cpu_only("a budget on a GPU counts what torch allocates, not what the process holds beside that")


@grows
def test_replanning_counts_growth_of_the_process_outside_of_tensors(monkeypatch, resident):
    monkeypatch.setattr(calibrate, "TOLERANCE", -1.0)
    nbytes = 128 * 2**20
    planned, again = reports_of_growth(nbytes, resident, min_swap_bytes=SMALL)
    assert again.plan_origin.startswith("replanned")
    assert again.base_bytes >= planned.base_bytes + 0.9 * nbytes  # what was in reserve comes first


@grows
@pytest.mark.parametrize("after_step", [1, 4])  # 4: the first by a replanned one
def test_growth_within_the_margin_is_part_of_later_predictions(after_step, monkeypatch, resident):
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    nbytes = 32 * 2**20
    planned, steady = reports_of_growth(nbytes, resident, after_step=after_step, policy="none")
    assert steady.plan_origin == planned.plan_origin
    assert steady.predicted_peak_bytes >= planned.predicted_peak_bytes + 0.9 * nbytes  # what was in reserve comes first


class FakeMemory:
    """16 MiB are in use, 4 of them for reuse only."""

    total_bytes = free_bytes = staticmethod(lambda: 2**30)
    used_bytes = staticmethod(lambda: 16 * 2**20)
    reusable_bytes = staticmethod(lambda: 4 * 2**20)
    used_tensor_bytes = staticmethod(lambda: 2**20)
    trim = staticmethod(lambda: None)


@pytest.mark.parametrize(
    ("base", "reserve", "margin", "small", "expected"),
    [
        (3, 2, 64, 0, (10, 57)),  # 12 in use, of which 2 are what was reserved
        (3, 2, 64, 5, (15, 52)),  # and small tensors will take 5
        (3, 2, 14, 0, (10, 10)),  # no margin is used up
        (3, 2, 10, 0, (10, 10)),
        (10, 5, 64, 0, (10, 64)),  # the optimizer has not come yet
    ],
)
def test_growth_is_taken_from_the_margin_first(base, reserve, margin, small, expected):
    budget = BudgetTracker(
        Options.parse("1GiB"), "cpu", FakeMemory(), TrainableParameters(lambda: []), no_weights(), notes=Notes("Net")
    )
    planned = Allowance(2**30, base * 2**20, 0, reserve * 2**20, margin * 2**20)
    grown = planned.with_growth(budget.in_use_bytes(small * 2**20))
    assert (grown.base_bytes, grown.margin_bytes) == tuple(2**20 * nbytes for nbytes in expected)
    assert replace(grown, grown_bytes=0) == planned
    assert grown.with_growth(budget.in_use_bytes(small * 2**20)) == grown  # read again, it counts once


@pytest.mark.parametrize(
    ("device", "num_ops", "margin"), [("cpu", 0, 16), ("cpu", 128, 19), ("cpu", 4096, 112), ("cuda", 4096, 32)]
)
def test_code_is_part_of_the_margin_if_it_takes_device_memory(device, num_ops, margin):
    views = [f"v{n} 0: a{n} ->" for n in range(num_ops)]  # ops that make nothing count for nothing
    step = build("\n".join(["forward", *(f"f{n} 1: x -> a{n}" for n in range(num_ops)), *views]))
    budget = BudgetTracker(
        Options.parse("1GiB"), device, FakeMemory(), TrainableParameters(lambda: []), no_weights(), notes=Notes("Net")
    )
    assert budget.allowance(step.program).margin_bytes == margin * 2**20


def leaving(nbytes: int, planned: Allowance) -> Allowance:
    """``planned`` after a growth that leaves so much for the step."""
    fixed_bytes = planned.found_bytes + planned.reserve_bytes
    return replace(planned, grown_bytes=planned.budget_bytes - fixed_bytes - nbytes, planned_margin_bytes=0)


@pytest.mark.cpu_only("its bytes are those of a step on the CPU")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # which reads the real process
@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("resident")
def test_growth_beyond_the_margin_is_replanned_for(step, monkeypatch):
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    # By what ops take on this machine now the first plan might already need no more than it will have.
    monkeypatch.setattr(OpProfiler, "costs", lambda meter, program, *_: meter._estimate(program))
    readings = iter([3, 4])

    def with_growth(planned, in_use_bytes, over_bytes):
        # The step has 36 MiB unplanned and needs 27.3.
        return planned if next(readings) < step else leaving(28 * 2**20, planned)

    budget = tight_budget(train(LARGE, policy="none")[1], 0.97)
    expected, _ = train(LARGE, num_steps=5, budget=budget, policy="auto")
    monkeypatch.setattr(Allowance, "with_growth", with_growth)
    monkeypatch.setattr(allowance, "GROWTH_BYTES", 2**20)
    actual, report = train(LARGE, num_steps=5, budget=budget, policy="auto")
    assert report.plan_origin == f"replanned after step {step}"
    assert re.search(r"MiB more are in use between steps", report.plan_notes[-1])
    assert report.predicted_peak_bytes <= budget
    assert same_bits(actual, expected)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.cpu_only("its bytes are those of a step on the CPU")
def test_replanning_releases_the_memory_of_the_old_plan(monkeypatch):
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    monkeypatch.setattr(Allowance, "with_growth", lambda planned, *_bytes: leaving(30 * 2**20, planned))  # of 36
    monkeypatch.setattr(allowance, "GROWTH_BYTES", 2**20)
    torch.compiler.reset()
    model = lmswap.enable(LARGE.make(), "4GiB", min_swap_bytes=SMALL)
    used, held = lmswap.api._sessions[model].memory, []
    used.trim()
    before_bytes = used.used_tensor_bytes()
    for _ in range(5):
        LARGE.loss(model(LARGE.batch())).backward()
        model.zero_grad()
        held.append(used.used_tensor_bytes() + used.reusable_bytes() - before_bytes)
    lmswap.disable(model)
    assert held[-1] < held[0] - 4 * 2**20  # 36 and 43 MiB, with the batch and what the loss makes


def test_a_budget_of_auto_is_reported_in_bytes():
    (note,) = [note for note in train(budget="auto")[1].notes if note.startswith("budget 'auto' is ")]
    assert note.endswith("less 10% for others")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compiler": "eager"}, {"policy": "recompute"}], ids=str)
def test_measured_and_predicted_times_are_compared_op_by_op(options, monkeypatch):
    given = []
    monkeypatch.setattr(replan, "calibrate", lambda *a, **k: given.append((a, k)) or calibrate.calibrate(*a, **k))
    if "policy" in options:
        options = {**options, "budget": tight_budget(train(LARGE, policy="none")[1], 0.9)}
    expected, _ = train(LARGE, policy="none", num_steps=6)
    given.clear()
    actual, _ = train(LARGE, num_steps=6, **options)
    assert same_bits(actual, expected)
    ((program, _, _, plan), measured) = given[-1]
    runs = schedule(program, plan.recomputes).program
    assert bool(plan.recomputes) == ("policy" in options)
    assert [len(seconds) for seconds in measured["op_seconds"]] == [s.stop - s.start for s in runs.segments]
    assert all(seconds >= 0 for segment in measured["op_seconds"] for seconds in segment)
    assert all(sum(seconds) > 0 for seconds in measured["op_seconds"])


@pytest.mark.slow
@pytest.mark.cpu_only("its budget leaves a MiB, and a GPU's allocator reserves by 20")
def test_a_plan_is_replaced_by_one_for_measured_costs_within_the_same_bound(monkeypatch):
    monkeypatch.setattr(replan_triggers, "_WORTH_USING", 10.0)
    expected, unplanned = train(LARGE, policy="none", num_steps=6)
    tight = {"policy": "auto", "budget": tight_budget(unplanned, 0.9), "link": "100MB/s"}
    monkeypatch.setattr(calibrate, "TOLERANCE", -1.0)
    monkeypatch.setitem(_POLICIES, "auto", lambda problem: replace(plan_swap_all(problem), policy="auto"))
    calibrated, searched, bounded = [], [], []

    def calibrate_once(*args, **kwargs):
        calibrated.append(calibrate.calibrate(*args, **kwargs))
        monkeypatch.setitem(_POLICIES, "auto", plan_auto)
        return calibrated[-1]

    monkeypatch.setattr("lmswap.planner.certify", lambda *a, **k: bounded.append(a[0].costs) or certify(*a, **k))
    monkeypatch.setattr(replan, "calibrate", calibrate_once)
    monkeypatch.setattr(planner, "make_plan", lambda *a, **k: searched.append(a) or make_plan(*a, **k))
    actual, report = train(LARGE, num_steps=6, **tight)
    assert searched[-1][2:] == (calibrated[-1].costs, calibrated[-1].machine) != searched[0][2:]
    assert bounded.count(calibrated[-1].costs) == 1
    assert same_bits(actual, expected)
    assert report.plan_origin == "replanned after step 3"
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    _, second = train(LARGE, num_steps=5, **tight)
    assert second.predicted_seconds == pytest.approx(report.predicted_seconds, rel=0.5)
    assert second.plan_origin == "from cache"
