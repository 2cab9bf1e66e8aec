"""A replanner measures, decides and acts once per step boundary; engine, memory and budget are stand-ins."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmswap.capture.merge_programs import MergedPrograms
from lmswap.errors import TierError
from lmswap.ir.backward_parts import part_bytes
from lmswap.ir.fixed_memory import TrainedMemory
from lmswap.ir.machine import Machine
from lmswap.ir.program import BufferKind
from lmswap.options import Options
from lmswap.planner import make_plan
from lmswap.planner.cache import CachedPlan, PlannedMemory
from lmswap.reporting.replan_reasons import UnusedMargin, WarmUpGrowth
from lmswap.runtime.own_time import OwnTime
from lmswap.runtime.step_record import EndedStep, Peaks
from lmswap.session import planner
from lmswap.session.allowance import Allowance, Held
from lmswap.session.context import ModelContext
from lmswap.session.diagnostics import Notes
from lmswap.session.engine_setup import KnownMachine
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import Phase
from lmswap.session.planner import Planner
from lmswap.session.replan import Replanner, StepRun
from lmswap.session.retention import Retention, RetentionEstimate
from tests.ir.build import build, unit_machine
from tests.training_state.no_weights import no_weights

MIB = 2**20
GRAPHS = (3,)
STEP = build(
    """
    forward
    f1 1: x W -> a
    f2 1: a -> b
    f3 1: b -> y
    backward
    g2 1: t b -> c
    g1 1: c a -> gW
    """,
    sizes={"a": 64 * MIB, "b": 64 * MIB, "y": 32 * MIB, "c": 64 * MIB, "gW": 32 * MIB},
    outputs="y",
    tangents="t",
    gradients="gW",
)


class Model:
    """The replanner of a model on a device with an arena; its plan leaves ``spare_bytes`` of the allowance."""

    def __init__(self, monkeypatch, *, spare_bytes=0, retention=Retention.UNTIL_STEP_END, policy="auto"):
        monkeypatch.setenv("LMSWAP_CACHE_DIR", "")
        self.options, self.is_tier_full = Options.parse("1GiB", policy=policy, tier="host"), False
        self.notes, self.timed, self.searched = Notes("Net"), [], []
        self.arena = SimpleNamespace(num_computed=0, num_unplaced=0, resize=lambda nbytes: None)
        native = SimpleNamespace(
            reserve=self.reserve,
            tier_stats=lambda _: SimpleNamespace(reserve_seconds=0.0, capacity_bytes=0, resident_bytes=0),
        )
        recorder = SimpleNamespace(
            own=OwnTime(), num_steps=7, current_sequence=(), last=lambda: None, time_ops=lambda: self.timed.append(True)
        )
        engine = SimpleNamespace(arena=self.arena, native=native, recorder=recorder)
        nothing = lambda *_: None  # noqa: E731
        self.memory = memory = SimpleNamespace(
            trim=nothing, compact=nothing, decommit=nothing, min_counted_bytes=lambda: 0, uncounted=nullcontext
        )
        self.allowance = Allowance(2**40, 100 * MIB, 20 * MIB, 0, 32 * MIB)
        self.budget = SimpleNamespace(
            held=Held(20 * MIB),
            earlier_output_bytes=0,
            take_share=lambda _program, _costs, planned: planned,
            allowance=lambda _: self.allowance,
            unmoved=lambda planned, _, **__: planned,
            widen=lambda *_: False,
            shares=lambda *_: None,
            start_reserve_probe=nothing,
            end_reserve_probe=lambda _: 0,
            in_use_bytes=lambda _: 100 * MIB,
            trained_memory=TrainedMemory,
            absent_gradient_bytes=lambda _: 0,
            fragmented_bytes=lambda _: 0,
            settled_margin_bytes=lambda _: 32 * MIB,
        )
        self.retention = RetentionEstimate(lambda: False)
        self.retention.assume(retention)
        self.measured: list[Machine] = []
        assumed = replace(unit_machine(), is_measured=False)
        machine = KnownMachine(assumed, lambda: self.measured.append(unit_machine()) or self.measured[-1])
        context = ModelContext(
            "Net", self.options, engine, memory, self.budget, self.retention, machine, self.notes, no_weights()
        )
        self.planner = Planner(context)
        search = self.planner.search
        monkeypatch.setattr(self.planner, "search", lambda request: self.searched.append(request) or search(request))
        self.plans = StepPlans(context, self.planner)
        self.replanner = Replanner(context, self.planner, self.plans)
        step = self.plans.make(GRAPHS, MergedPrograms(STEP.program, (0,)), STEP.costs)
        self.allowance = self.allowance.of_step_bytes(step.tensor_peak_bytes + spare_bytes)
        self.plans.make(GRAPHS, MergedPrograms(STEP.program, (0,)), STEP.costs)
        self.searched.clear()

    def reserve(self, tier, nbytes, replace=False):
        if self.is_tier_full:
            raise TierError("no room")

    @property
    def step(self):
        return self.plans[GRAPHS]

    def run(self, *, is_steady: bool = True) -> bool:
        ended = EndedStep(7, ((3, "forward"), (3, "backward")), GRAPHS, Peaks(100 * MIB, 100 * MIB))
        run = StepRun(GRAPHS, ended, self.plans[GRAPHS], is_steady, None, False)
        return self.replanner.apply(run, lambda: frozenset({5}))


def test_a_run_as_planned_neither_searches_nor_compiles(monkeypatch):
    model = Model(monkeypatch)
    phases = []
    for _ in range(6):
        assert not model.run()
        phases.append(model.step.history.phase)
    assert phases == [Phase.TRACED, Phase.RECORDED, Phase.CALIBRATED, Phase.FINAL, Phase.FINAL, Phase.FINAL]
    assert (model.searched, [*model.notes], len(model.timed)) == ([], [], 1)
    assert model.step.history.released == {5}


def test_the_machine_is_measured_once_a_replan_moves_tensors(monkeypatch):
    model = Model(monkeypatch)
    model.run()
    assert not model.measured and not model.step.moves and not model.step.machine.is_measured
    model.budget.held = Held(20 * MIB + 60 * MIB)
    model.run()
    assert model.step.moves and model.step.machine.is_measured, model.notes[-1]
    assert len(model.measured) == 1


def test_pricing_a_cached_plan_imports_what_it_needs_without_counting(monkeypatch):
    model, events = Model(monkeypatch), []

    @contextmanager
    def uncounted():
        events.append("counting ends")
        yield
        events.append("counting goes on")

    model.memory.uncounted = uncounted
    monkeypatch.setattr(planner, "is_search_imported", lambda: False)
    monkeypatch.setattr(planner, "import_search", lambda: events.append("import"))
    model.planner.priced(model.step)
    assert events == ["counting ends", "import", "counting goes on"]


def test_a_misplaced_tensor_raises_retention_and_changes_offsets(monkeypatch):
    model = Model(monkeypatch, spare_bytes=2**30)
    model.arena.num_unplaced, before = 1, model.step.places
    assert model.run()
    assert model.retention.assumed is Retention.ACCUMULATED
    assert model.step.places.results_bytes > before.results_bytes
    assert len(model.searched) == 1
    assert model.notes[-1].startswith(
        "replanned after step 7: a tensor of a step was still held at offsets of the next"
    )
    assert not model.run()  # once


def test_only_an_activated_plan_lowers_retention(monkeypatch):
    model = Model(monkeypatch, retention=Retention.UNTIL_BACKWARD, policy="none")
    model.budget.held = Held(20 * MIB + 10 * MIB)
    model.run()
    assert model.retention.assumed > Retention.UNTIL_BACKWARD
    assert "10.00 MiB more are held between steps" in model.notes[-1]
    assert model.step.tensor_peak_bytes <= model.step.allowance.step_bytes
    model.budget.held = Held(2**35)
    assert model.run()
    assert model.retention.assumed is Retention.NO_OVERLAP
    assert model.step.is_overdrawn and "this one takes the least" in model.notes[-1]
    model.searched.clear()
    model.budget.held = Held(2**36)
    assert not model.run()  # known to be in vain
    assert model.searched == [] and model.notes[-1].endswith("and no plan takes less")


def test_a_refused_search_leaves_plan_and_retention(monkeypatch):
    model = Model(monkeypatch, policy="none")
    monkeypatch.setattr(Retention, "num_held", Retention.UNTIL_STEP_END.num_held)  # with any the plan takes the same
    model.budget.held = Held(2**35)
    assert not model.run()
    assert model.retention.assumed is Retention.UNTIL_STEP_END
    assert model.step.is_overdrawn and "the plan stays as it was after step 7: " in model.notes[-1]


def test_several_triggers_at_one_boundary_are_one_search_and_one_note(monkeypatch):
    model = Model(monkeypatch, spare_bytes=9 * MIB)
    model.arena.num_unplaced = 1
    model.budget.held = Held(20 * MIB + 10 * MIB)
    model.run()
    assert len(model.searched) == 1
    (note,) = model.notes
    assert note.count("replanned") == 1 and "are held between steps" in note and "still held at offsets" in note
    assert model.searched[0].allowance.tensor_bytes == 30 * MIB


@pytest.mark.parametrize("num_runs", [2, 3, 4])
def test_replans_keep_the_phase_and_first_plans_begin_at_the_first(monkeypatch, num_runs):
    model = Model(monkeypatch, spare_bytes=2**30)
    for _ in range(num_runs - 1):
        model.run()
    model.arena.num_unplaced = 1
    model.retention._is_known, model.retention._seen = False, Retention.UNTIL_STEP_END
    model.run()
    assert model.step.origin.startswith("replanned")
    assert model.step.history.phase is Phase(num_runs - 1)
    model.plans.make(GRAPHS, MergedPrograms(STEP.program, (0,)), STEP.costs)
    assert model.step.history.phase is Phase.TRACED


@pytest.mark.parametrize("source", ["a search", "the cache", "another rank"])
def test_a_plan_that_its_tier_has_no_room_for_leaves_the_old_one(monkeypatch, source):
    model = Model(monkeypatch, spare_bytes=2**30)
    limits = {"budget_bytes": model.step.allowance.step_bytes, "tier": "host", "min_swap_bytes": 1}
    swapping = make_plan("swap_all", STEP.program, STEP.costs, unit_machine(), **limits)
    other = CachedPlan(swapping, STEP.costs, unit_machine(), model.step.room)
    if source == "a search":
        monkeypatch.setattr(model.planner, "search", lambda request: (request, other))
    before, found = model.step, [WarmUpGrowth(10 * MIB, 0) if source != "the cache" else UnusedMargin(10 * MIB)]
    model.is_tier_full = True
    if source == "another rank":
        monkeypatch.setattr(model.plans, "fetch_replan", lambda *_: other)
        assert model.replanner._follow_other_rank(before)
    else:
        monkeypatch.setattr(model.plans, "load_cached_replan", lambda _: other if source == "the cache" else None)
        model.replanner._replan(before, found, is_priced=False)
    assert model.step.runs_as(before)
    assert model.notes[-1].startswith("the plan stays as it was after step 7: ")
    assert model.notes[-1].endswith("; no room")


def test_a_replanned_step_is_predicted_by_what_its_runs_have_shown(monkeypatch):
    model = Model(monkeypatch, spare_bytes=2**30)
    monkeypatch.setattr(model.memory, "min_counted_bytes", lambda: 48 * MIB)
    before = model.step.predicted
    for _ in range(4):
        model.run()
    measured = model.step.predicted
    assert measured.peak_bytes < before.peak_bytes
    model.arena.num_unplaced = 1
    model.retention._is_known, model.retention._seen = False, Retention.UNTIL_STEP_END
    model.run()
    assert model.step.origin.startswith("replanned")
    assert model.step.predicted == measured


def test_a_followed_plan_spares_reserve_as_the_process_that_saved_it_and_keeps_its_margin(monkeypatch):
    model = Model(monkeypatch, spare_bytes=2**30)
    model.allowance = replace(model.allowance, reserve_bytes=20 * MIB)
    saved = replace(model.step, room=PlannedMemory(model.step.room.step_bytes, 4 * MIB, 6 * MIB))
    monkeypatch.setattr(model.plans, "_pinned", object())
    followed = model.plans.make(GRAPHS, saved.merged, saved.costs, saved)
    assert followed.allowance.reserve_bytes == 16 * MIB
    assert followed.allowance.margin_bytes == model.allowance.margin_bytes


def test_the_newest_step_is_the_one_planned_last(monkeypatch):
    model = Model(monkeypatch)
    merged = MergedPrograms(STEP.program, (0,))
    for graphs in ((0,), (1,), (0,)):
        model.plans.make(graphs, merged, STEP.costs)
    assert model.plans.newest().graphs == (0,)
    model.plans.store(model.plans[(1,)])
    assert model.plans.newest().graphs == (0,)


def test_the_tier_stays_large_enough_for_all_plans(monkeypatch):
    model = Model(monkeypatch)
    limits = {"budget_bytes": 2**40, "tier": "host", "min_swap_bytes": 1}
    swapping = make_plan("swap_all", STEP.program, STEP.costs, unit_machine(), **limits)
    step = model.step
    model.plans.store(replace(step, graphs=(4,), plan=swapping))
    assert swapping.tier_bytes["host"] > step.plan.tier_bytes.get("host", 0)
    assert model.plans.tier_bytes("host") == swapping.tier_bytes["host"]


def test_growth_that_no_plan_fits_is_answered_by_the_least_plan(monkeypatch):
    model = Model(monkeypatch)
    before = model.step
    model.budget.held = Held(20 * MIB + 2**30)
    assert model.run()
    least = model.step
    assert least.tensor_peak_bytes < before.tensor_peak_bytes
    assert least.is_overdrawn
    assert model.notes[-1].startswith("replanned after step 7: 1.00 GiB more are held between steps")
    assert model.notes[-1].endswith("no plan fits the budget, and this one takes the least")
    model.budget.held = Held(20 * MIB + 2**31)
    assert not model.run()
    assert model.notes[-1].endswith("and no plan takes less")


def test_absent_gradients_hide_no_growth_where_gradients_add_up(monkeypatch):
    model = Model(monkeypatch, spare_bytes=2**30)
    accumulated = model.step.merged.program.with_gradients(BufferKind.ACCUMULATED_GRADIENT)
    gradient_bytes = accumulated.gradient_bytes
    # Of the gradients that a part of a backward has completed, each is held until the part ends.
    allowance = model.step.allowance.with_held(gradient_bytes + part_bytes(gradient_bytes))
    merged = replace(model.step.merged, program=accumulated)
    model.plans.store(replace(model.step, merged=merged, allowance=allowance))
    model.budget.streams_gradients = False
    for absent_bytes in (gradient_bytes, 0, gradient_bytes):  # at the first of some batches, between, and again
        model.budget.absent_gradient_bytes = lambda _, absent_bytes=absent_bytes: absent_bytes
        model.budget.held = Held(20 * MIB + gradient_bytes - absent_bytes)
        model.run()
        assert model.step.allowance.tensor_bytes == allowance.tensor_bytes
    model.budget.held = Held(20 * MIB + 36 * MIB)
    model.run()
    assert model.step.allowance.tensor_bytes == allowance.tensor_bytes + 36 * MIB
