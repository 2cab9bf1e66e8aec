"""Growth of memory outside of a model: each time counted, and planned for or reported as without room."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lmswap
from lmswap.hardware import memory
from tests.models import Case, tight_budget
from tests.resident import Resident, memory_of_tensors
from tests.session.training import train
from tests.training import same_bits, session_of

MIB = 2**20

pytestmark = [
    pytest.mark.cpu_only("what comes outside of an arena has a test of its own"),
    pytest.mark.usefixtures("no_garbage"),
]


def layers():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.LayerNorm(128), nn.GELU())))


# Each of its activations has 12 MiB, its step some 120.
CASE = Case(layers, lambda: torch.randn(12 * 2**11, 128))


@pytest.fixture(scope="module", autouse=True)
def resident():
    with memory_of_tensors() as resident:
        yield resident


@pytest.fixture(scope="module")
def unplanned(resident):
    return train(CASE, policy="none", num_steps=9)


def grown(budget, grow, *, in_steps, num_steps=9, policy="auto"):
    """Bits of steps after some of which ``grow`` is called, and the report of each."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, bits, reports = lmswap.enable(CASE.make(), budget, policy=policy, min_swap_bytes=4096), [], []
    for number in range(1, num_steps + 1):
        model.zero_grad()
        loss = CASE.loss(model(CASE.batch()))
        loss.backward()
        bits += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        if number in in_steps:
            grow()
        reports.append(lmswap.report(model))
    lmswap.disable(model)
    return bits, reports


def keeping(kept, mib):
    return lambda: kept.append(torch.ones(mib * 2**18))


def test_growth_that_fits_is_part_of_later_predictions(unplanned):
    kept = []
    bits, reports = grown("4GiB", keeping(kept, 20), in_steps=(5, 6, 7))
    assert same_bits(bits, unplanned[0])
    for number in (6, 7, 8):
        before, after = reports[number - 2], reports[number - 1]
        assert 0 <= 20 * MIB - (after.base_bytes - before.base_bytes) < MIB / 4  # what was in reserve comes first
        assert abs(after.measured_peak_bytes - after.predicted_peak_bytes) < MIB
    assert len(reports[-1].plan_notes) == len(reports[4].plan_notes)  # no other plan is needed


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
def test_growth_without_room_replans_each_time_until_no_plan_fits(unplanned):
    kept, budget = [], tight_budget(unplanned[1], 0.95)
    bits, reports = grown(budget, keeping(kept, 37), in_steps=(5, 6, 7, 8))
    assert same_bits(bits, unplanned[0])
    exceeded = [number for number in (6, 7, 8, 9) if reports[number - 1].measured_peak_bytes > budget]
    assert exceeded == [8, 9]
    assert reports[8].base_bytes - reports[7].base_bytes == 37 * MIB  # a search that found nothing leaves nothing held
    notes = [note for note in reports[-1].plan_notes if "more are held between steps" in note]
    assert [note.split(":")[0] for note in notes] == [
        "replanned after step 5",
        "replanned after step 6",
        "replanned after step 7",
        "the plan stays as it was after step 8",
    ]
    assert "no plan fits the budget, and this one takes the least" in notes[2]
    assert reports[7].predicted_peak_bytes < reports[6].predicted_peak_bytes + 37 * MIB  # with room for what came


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of the steps that show it
def test_growth_outside_of_tensors_is_replanned_for_when_a_peak_shows_it(unplanned, resident):
    def grow():
        resident.other_bytes += 30 * MIB

    budget = tight_budget(unplanned[1], 0.95)
    bits, reports = grown(budget, grow, in_steps=(5, 6))
    assert same_bits(bits, unplanned[0])
    notes = [note for note in reports[-1].plan_notes if "MiB more than before are in use between steps" in note]
    assert [note.split(":")[0] for note in notes] == ["replanned after step 5", "replanned after step 6"]
    assert reports[-1].measured_peak_bytes <= budget


def test_growth_in_each_step_is_planned_for_in_advance(unplanned):
    kept, budget = [], tight_budget(unplanned[1], 0.95)
    _, reports = grown(budget, keeping(kept, 9), in_steps=range(5, 10), num_steps=10)
    notes = [note for note in reports[-1].plan_notes if note.startswith("replanned") and "are held" in note]
    assert 1 < len(notes) < 4
    assert reports[-1].measured_peak_bytes <= budget


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
def test_growth_while_others_run_is_planned_for_before_the_next_step_of_a_size(unplanned, resident):
    batch, budget = CASE.batch(), tight_budget(unplanned[1], 0.95)
    torch.compiler.reset()
    model = lmswap.enable(CASE.make(), budget, min_swap_bytes=4096)
    for number in range(17):
        model.zero_grad()
        CASE.loss(model(batch[:2048] if 7 <= number < 16 else batch)).backward()
        resident.other_bytes += 30 * MIB * (number == 12)
        assert lmswap.report(model).measured_peak_bytes <= budget
    assert "MiB more than before are in use between steps" in lmswap.report(model).plan_notes[-1]
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of the step that shows it
def test_what_larger_steps_leave_for_reuse_is_released_where_it_exceeds_the_budget(unplanned, monkeypatch):
    class Retained(Resident):
        """Its peaks count what the heap retains, as those of a process do."""

        def watch(self):
            watch = super().watch()
            value, restart = (partial(self.at_least, read) for read in (watch.value, watch.restart))
            return SimpleNamespace(**{**vars(watch), "value": value, "restart": restart})

        def at_least(self, read):
            return max(self(), read())

    batch, retained, budget, over = CASE.batch(), Retained(), tight_budget(unplanned[1], 1.2), []
    monkeypatch.setattr(memory, "resident_bytes", retained)
    monkeypatch.setattr(memory, "_RESIDENT", retained)
    torch.compiler.reset()
    model = lmswap.enable(CASE.make(), budget, min_swap_bytes=4096)
    for number in range(18):
        model.zero_grad()
        CASE.loss(model(batch if number < 7 or number == 14 else batch[:2048])).backward()
        over.append(lmswap.report(model).measured_peak_bytes > budget)
        if number == 15:
            retained.other_bytes += budget + 2 * MIB - session_of(model).memory.used_bytes()
    assert over == [number == 16 for number in range(18)]
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of the step that shows it
def test_a_loss_that_takes_more_from_some_step_on_is_planned_for_from_the_next_one(unplanned):
    budget, peaks, found = tight_budget(unplanned[1], 0.95), [], []
    for budgeted in (None, budget):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = CASE.make()
        if budgeted:
            lmswap.enable(model, budgeted, min_swap_bytes=4096)
        bits = []
        for number in range(1, 10):
            model.zero_grad()
            out = model(CASE.batch())
            others = range(2, 4 if number >= 6 else 2)
            loss = CASE.loss(out) + sum((factor * out).square().mean() for factor in others)
            loss.backward()
            bits += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            peaks += [lmswap.report(model).measured_peak_bytes] if budgeted else []
        found.append(bits)
        if budgeted:
            notes = lmswap.report(model).plan_notes
        lmswap.disable(model)
    assert same_bits(*found)
    over = [number for number, peak in enumerate(peaks, 1) if peak > budget]
    assert over in ([6], [6, 7])  # two, if the plan moved nothing until then
    assert any(note.startswith(f"replanned after step {over[-1]}") for note in notes)
