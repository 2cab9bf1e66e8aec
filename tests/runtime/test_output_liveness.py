"""Outputs are predicted as live only while the caller keeps them; plans count both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lmswap
from lmswap.ir.program import BufferKind
from tests.models import quick_of
from tests.training import session_of

# Tensors of 4 MiB each; what one holds beside them is in parameters, which live outside of the step.
WIDTH, ROWS = 512, 2048
NBYTES = 4 * ROWS * WIDTH
HANDS_OVER_TANGENTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def drop(model, batch):
    model(batch).mean().backward()


def keep_output(model, batch):
    output = model(batch)
    output.mean().backward()
    return output


def keep_both(model, batch):
    output = model(batch)
    tangents = []
    output.register_hook(tangents.append)
    output.mean().backward()
    return output, tangents


def step_after(take, make_model):
    """The planned step after some that ``take`` took, and the most that its tensors held in one of them."""
    torch.compiler.reset()
    model = lmswap.enable(make_model(), policy="none")
    session, batch = session_of(model), torch.randn(ROWS, WIDTH)
    for _ in range(6):
        model.zero_grad(set_to_none=False)
        before_bytes = session.memory.used_tensor_bytes()
        session.memory.reset_tensor_peak()
        take(model, batch)
        peak_bytes = session.memory.peak_tensor_bytes() - before_bytes
    step = session.current_step()
    lmswap.disable(model)
    return step, peak_bytes


def chain():
    """Its last op saves nothing, so that only the caller holds its output."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def output_is_saved():
    return nn.Sequential(chain(), nn.Sigmoid())


@pytest.mark.parametrize("make_model", quick_of([chain, output_is_saved], [output_is_saved]))
@pytest.mark.parametrize(
    ("take", "released"),
    [
        (drop, {BufferKind.OUTPUT, BufferKind.TANGENT} if HANDS_OVER_TANGENTS else {BufferKind.OUTPUT}),
        (keep_output, {BufferKind.TANGENT} if HANDS_OVER_TANGENTS else set()),
        (keep_both, set()),
    ],
)
def test_predicted_bytes_are_those_that_tensors_hold(make_model, take, released):
    step, peak_bytes = step_after(take, make_model)
    program = step.merged.program
    assert {program.buffers[buffer].kind for buffer in step.history.released} == released
    assert step.predicted.peak_bytes <= step.plan.predicted_peak_bytes
    assert step.predicted.peak_bytes == pytest.approx(peak_bytes, abs=NBYTES // 4)
