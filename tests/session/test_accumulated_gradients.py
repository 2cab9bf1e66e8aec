"""Accumulated gradients need memory once: each is yielded when it is computed, and added in place."""

import hashlib

import pytest
import torch
from torch import nn

import lmswap
from lmswap.reporting.replan_reasons import AccumulatedGradients

ADDS_UP = str(AccumulatedGradients())
# A set of gradients is 81 MiB. With one of them a step takes some 110 MiB, of which 26 are kept free; with two 190.
WIDTH, DEPTH, BATCH = 768, 6, 256
BUDGET = "145MiB"

pytestmark = pytest.mark.cpu_only("its bytes are those of a step on the CPU; tests/gpu/test_budget_cuda.py has a GPU's")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def bits(tensor):
    """Something that takes no memory, as what a test keeps is the loop's."""
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def train(*, num_steps=4, steps_of_optimizer=2, saved=None, zeroes=True, **options):
    """The bits of losses and, before each step of the optimizer, gradients; and the report, with ``options``."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    if options:
        lmswap.enable(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    results = []
    for step in range(num_steps):
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        loss.backward()
        results.append(bits(loss.detach()))
        if (step + 1) % steps_of_optimizer == 0:
            results += [bits(parameter.grad) for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=zeroes)
        del loss
    if not options:
        return results, None
    if saved is not None:
        lmswap.save_plan(model, saved)
    report = lmswap.report(model)
    lmswap.disable(model)
    return results, report


@pytest.fixture(scope="module")
def plain():
    return train()[0]


def notes_of(report):
    return [note for note in report.plan_notes if ADDS_UP in note]


@pytest.mark.parametrize(
    "habits",
    [pytest.param({}, id="let go of"), pytest.param({"zeroes": False}, id="filled with zeros", marks=pytest.mark.slow)],
)
def test_gradients_that_are_added_up_have_room_once(plain, habits):
    actual, report = train(budget=BUDGET, **habits)
    assert actual == plain
    assert report.highest_peak_bytes <= report.budget_bytes
    assert report.swapped_out_bytes + report.recomputed_bytes > 0
    assert any(note.startswith("replanned after step 1") for note in notes_of(report))


@pytest.mark.slow
@pytest.mark.usefixtures("resident")
def test_their_plan_is_remembered(plain):
    for source in ("", " from cache"):
        actual, report = train(budget=BUDGET)
        assert actual == plain
        assert notes_of(report) == [f"replanned after step 1{source}: {ADDS_UP}"]


@pytest.mark.slow
def test_verification_needs_room_for_a_second_set_of_gradients(plain):
    """What verifies a backward has to have all that it gives."""
    actual, report = train(budget=BUDGET, verify=True)
    assert actual == plain
    assert not notes_of(report)
    assert any("81.00 MiB more are held between steps" in note and "cannot fit" in note for note in report.plan_notes)


@pytest.mark.slow
def test_a_saved_plan_of_accumulated_steps_is_followed_at_once(plain, tmp_path):
    path = tmp_path / "step.json"
    train(budget=BUDGET, saved=path)
    actual, report = train(plan=path)
    assert actual == plain
    assert report.highest_peak_bytes <= report.budget_bytes
    assert report.swapped_out_bytes + report.recomputed_bytes > 0
    assert [*notes_of(report)] == [f"the plan stays that of '{path}' after step 1: {ADDS_UP}"]


@pytest.mark.slow
def test_with_inductor_too():
    expected, _ = train(policy="none", compiler="inductor")
    actual, report = train(budget=BUDGET, compiler="inductor")
    assert actual == expected
    assert report.highest_peak_bytes <= report.budget_bytes
    assert report.swapped_out_bytes > 0
    assert notes_of(report) == [f"replanned after step 1: {ADDS_UP}"]


@pytest.mark.slow
def test_gradients_of_each_step_alone_come_together():
    report = train(budget=BUDGET, steps_of_optimizer=1)[1]
    assert not notes_of(report)
