"""Outputs that a loop holds until it has those of the next step are no memory of the whole next step."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.session.earlier_outputs import EarlierOutputs

MIB = 2**20


class Steps:
    """A loop whose calls return 4 MiB."""

    def __init__(self):
        self.outputs = EarlierOutputs()

    def call(self):
        self.outputs.begin_call()
        begun_bytes = self.outputs.held_bytes
        made = torch.empty(MIB)
        self.outputs.end_call([made, made[1:]])
        return made, begun_bytes


def test_outputs_that_the_next_call_replaces_are_held_until_it_returns():
    steps, found = Steps(), []
    for _ in range(3):
        out, begun_bytes = steps.call()
        found.append((begun_bytes, steps.outputs.begun_bytes, steps.outputs.held_bytes))
        steps.outputs.begin_backward()
        assert out.numel()
    assert found == [(0, 0, 0), (4 * MIB, 4 * MIB, 0), (4 * MIB, 4 * MIB, 0)]


def test_outputs_that_are_dropped_before_the_next_call_are_not_held():
    steps = Steps()
    for _ in range(3):
        _, begun_bytes = steps.call()
        steps.outputs.begin_backward()
        del _
    assert begun_bytes == steps.outputs.begun_bytes == 0


def test_outputs_that_the_caller_keeps_are_not_those_of_a_forward():
    steps, kept = Steps(), []
    for _ in range(3):
        out, begun_bytes = steps.call()
        kept.append(out)
        steps.outputs.begin_backward()
    assert begun_bytes == steps.outputs.begun_bytes == 0


def test_calls_without_a_backward_between_them_are_of_one_step():
    steps = Steps()
    first, _ = steps.call()
    second, begun_bytes = steps.call()
    steps.outputs.begin_backward()
    assert begun_bytes == 0
    del first
    assert steps.call()[1] == 4 * MIB  # the second
    del second


def deep():
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(*layers, nn.Linear(64, 512))


@pytest.mark.cpu_only("an arena has room of its own for outputs")
@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_the_peak_of_a_loop_that_binds_its_outputs_is_predicted(compiler, resident):
    torch.compiler.reset()
    model = lmswap.enable(deep(), "1GiB", compiler=compiler)
    for _ in range(6):
        out = model(torch.randn(8192, 64))
        out.square().mean().backward()
    report = lmswap.report(model)
    lmswap.disable(model)
    assert out.nbytes == 16 * MIB
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 2 * MIB


@pytest.mark.cpu_only("an arena has room of its own for losses")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of the first step, whose loss is not known
def test_a_share_that_is_too_small_for_a_loss_is_widened_once_that_is_measured(resident):
    torch.compiler.reset()
    model = lmswap.enable(deep(), "60%")
    for _ in range(6):
        out = model(torch.randn(8192, 64))
        sum((factor * out).square().mean() for factor in range(8)).backward()
    report = lmswap.report(model)
    lmswap.disable(model)
    assert any(note.startswith("budget '60%' is too small for this step: the least that") for note in report.notes)
    assert report.measured_peak_bytes <= report.budget_bytes
