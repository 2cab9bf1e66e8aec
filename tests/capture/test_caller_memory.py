"""Memory of the caller between forward and backward is part of the budget: assumed first, then as observed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lmswap
from lmswap.analyze.cost import unit
from lmswap.capture.caller_memory import LossMeter, assumed_bytes, loss_bytes
from lmswap.ir.program import LOSS
from lmswap.session.planned_step import PlannedStep
from tests.capture.captured import capture
from tests.models import quick_of, tight_budget
from tests.training import session_of

ROWS, WIDTH, CLASSES = 8192, 128, 256  # narrow: many bytes for little arithmetic
LOGITS_BYTES = 4 * ROWS * CLASSES  # 8 MiB; each activation has half of that


class Classifier(nn.Module):
    """Its saved activations, which can leave, take several times what its loss does."""

    def __init__(self, num_layers: int = 12) -> None:
        super().__init__()
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


Loss = Callable[[torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.arange(ROWS) % CLASSES)


def mean(logits: torch.Tensor) -> torch.Tensor:
    return logits.mean()


def hungry(logits: torch.Tensor) -> torch.Tensor:
    """Takes more than is assumed of one that was not seen."""
    return sum((logits * factor).sigmoid().mean() for factor in range(2, 8))


def train(model: nn.Module, loss: Loss, num_steps: int) -> tuple[list[int], list[int]]:
    """By step, the most that tensors held above what was there before, and what its plan leaves them."""
    memory, batch, peaks, budgets = session_of(model).memory, torch.randn(ROWS, WIDTH), [], []

    def in_force(output: torch.Tensor) -> torch.Tensor:
        budgets.append(session_of(model).current_step().plan.budget_bytes)
        return output

    for _ in range(num_steps):
        model.zero_grad(set_to_none=False)
        before_bytes, start_seconds = memory.used_tensor_bytes(), time.monotonic()
        loss(in_force(model(batch))).backward()
        changes = memory.tensor_changes(start_seconds, time.monotonic())
        peaks.append(max(nbytes for _, nbytes in changes) - before_bytes)
    return peaks, budgets


class Planned(NamedTuple):
    peaks: list[int]  # by step
    budgets: list[int]
    step: PlannedStep  # the last one
    notes: list[str]


def planned(loss: Loss, share: float, num_layers: int = 12) -> Planned:
    """Six steps that may hold ``share`` of what they would unplanned."""
    torch.compiler.reset()
    probe = lmswap.enable(Classifier(num_layers), policy="none")
    train(probe, loss, num_steps=2)
    budget_bytes = tight_budget(lmswap.report(probe), share)
    lmswap.disable(probe)
    torch.compiler.reset()
    model = lmswap.enable(Classifier(num_layers), budget=budget_bytes)
    peaks, budgets = train(model, loss, num_steps=6)
    step, notes = session_of(model).current_step(), list(session_of(model).plan_notes)
    lmswap.disable(model)
    return Planned(peaks, budgets, step, notes)


@pytest.mark.parametrize("loss", quick_of([cross_entropy, mean], [cross_entropy]))
def test_a_step_follows_its_plan_whatever_memory_the_loss_takes(loss):
    run = planned(loss, share=0.6)
    assert run.step.plan.swaps or run.step.plan.recomputes
    assert all(peak <= budget for peak, budget in zip(run.peaks, run.budgets, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # its first step may hold more, and says so
def test_a_loss_above_the_assumption_is_replanned_for_in_the_second_step():
    run = planned(hungry, share=0.6)
    assert all(peak <= budget for peak, budget in zip(run.peaks[1:], run.budgets[1:], strict=True))
    assert any("the loss takes" in note for note in run.notes)


@pytest.mark.parametrize("loss", quick_of([cross_entropy, mean, hungry], [hungry]))
def test_the_peak_of_a_step_is_predicted_with_its_loss(loss):
    run = planned(loss, share=4.0)
    assert not run.step.plan.swaps
    assert run.peaks[-1] == pytest.approx(run.step.predicted.peak_bytes, rel=0.02)


def test_a_budget_without_room_for_an_unseen_loss_is_not_refused():
    run = planned(mean, share=1.1, num_layers=0)
    assert all(peak <= budget for peak, budget in zip(run.peaks, run.budgets, strict=True))
    assert any("to the loss" in note for note in run.notes)


def test_only_a_forward_with_a_backward_ends_with_a_loss_op():
    training, _ = capture(nn.Linear(4, 4), torch.randn(2, 4))
    program = training.lowered[0].program
    forward, _ = program.segments
    assert [op.index for op in program.ops if op.target == LOSS] == [forward.stop - 1]
    with torch.no_grad():
        inference, _ = capture(nn.Linear(4, 4), torch.randn(2, 4))
    assert LOSS not in [op.target for op in inference.lowered[0].program.ops]


def test_a_loss_is_assumed_to_take_three_tensors_of_4_bytes_an_element():
    def assumed(dtype: torch.dtype) -> int:
        recording, _ = capture(nn.Linear(4, 8).to(dtype), torch.randn(2, 4, dtype=dtype))
        return assumed_bytes(recording.lowered[0].program)

    assert [assumed(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [192, 192, 384]


class Tensors:
    """A device whose tensors hold what the test says."""

    used_bytes = peak_bytes = 0

    def hold(self, nbytes: int) -> None:
        self.used_bytes, self.peak_bytes = nbytes, max(self.peak_bytes, nbytes)

    def used_tensor_bytes(self) -> int:
        return self.used_bytes

    def peak_tensor_bytes(self) -> int:
        return self.peak_bytes

    def reset_tensor_peak(self) -> None:
        self.peak_bytes = self.used_bytes


@pytest.mark.parametrize(
    ("following", "seen"),
    [((0, "backward"), 30), ((1, "forward"), 30), ((0, "forward"), None), ((0, "inference"), None)],
)
def test_loss_bytes_are_the_peak_between_forward_and_next_segment(following, seen):
    recording, _ = capture(nn.Linear(4, 4), torch.randn(2, 4))
    program = recording.lowered[0].program
    tensors = Tensors()
    meter = LossMeter(tensors)
    for nbytes in (500, 100):  # a forward that held more than its loss does
        tensors.hold(nbytes)
    meter.after_segment(0, "forward", lambda: program)
    for nbytes in (130, 110):
        tensors.hold(nbytes)
    meter.before_segment(*following)
    tensors.hold(900)
    meter.before_segment(0, "backward")
    meter.expect_as(1, 0)
    for graph in (0, 1):
        costs = meter.with_measured(unit(program), program, (graph,))
        assert loss_bytes(costs, program) == (seen or 0)
    assumed = unit(program).with_scratch({op.index: 7 for op in program.ops if op.target == LOSS})
    assert loss_bytes(meter.without_assumed(assumed, program, (0,)), program) == (7 if seen else 0)


@pytest.mark.cpu_only("on a GPU each size has a trace of its own")
def test_the_memory_of_a_loss_grows_with_the_sizes_of_its_step():
    torch.compiler.reset()
    model, found = lmswap.enable(Classifier(1), "8GiB"), {}
    for rows in (1024, 2048, 3072, 3072, 4096, 6144):
        logits = model(torch.randn(rows, WIDTH))
        F.cross_entropy(logits, torch.arange(rows) % CLASSES).backward()
        step = session_of(model).current_step()
        found[rows] = loss_bytes(step.costs, step.merged.program)
    lmswap.disable(model)
    expected = [pytest.approx(nbytes, rel=1e-6) for nbytes in (3 / 4 * found[4096], 3 / 2 * found[4096])]
    assert [found[3072], found[6144]] == expected
    assert found[4096]
