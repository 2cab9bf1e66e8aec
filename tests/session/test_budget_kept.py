"""A budget is kept from the first step on, as the kernel counts resident memory; a plan, as the heap counts tensors."""

import json
import subprocess
import sys

import pytest
import torch

import lmswap
from lmswap.planner import calibrate
from tests.models import CHAIN, Case
from tests.rewrite.random_planner import plan_at_random
from tests.training import session_of


def run(model: str, policy: str, num_steps: int, share: float) -> dict:
    command = [sys.executable, "-m", "tests.session.resident_steps", model, policy, str(num_steps), str(share)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "policy", "share"),
    [
        ("transformer", "recompute", 0.7),
        ("transformer", "swap", 0.6),
        ("unet3d", "auto", 0.65),
    ],
)
@pytest.mark.slow  # `make demo` checks the same for each change
def test_resident_memory_grows_by_no_more_than_the_budget_in_five_steps(model, policy, share):
    figures = run(model, policy, num_steps=5, share=share)
    assert max(figures["moved_bytes"]) > 0
    assert max(figures["grown_bytes"]) <= figures["budget_bytes"]


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_tensors_hold_no_more_than_planned_under_any_plan(seed, monkeypatch):
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(seed))
    monkeypatch.setattr(calibrate, "TOLERANCE", 1e6)
    batch = CHAIN.batch()  # there before the step, as its plan has it
    case = Case(CHAIN.make, lambda: batch)
    torch.compiler.reset()
    model = lmswap.enable(case.make(), policy="none", min_swap_bytes=4096)
    memory = session_of(model).memory
    before_bytes = memory.used_tensor_bytes()
    for _ in range(3):
        memory.reset_tensor_peak()
        case.loss(model(batch)).backward()
        model.zero_grad()
        peak_bytes = memory.peak_tensor_bytes() - before_bytes
        assert 0 < peak_bytes <= session_of(model).current_step().plan.predicted_peak_bytes
    report = lmswap.report(model)
    assert report.swapped_out_bytes > 0
    assert report.recomputed_bytes > 0
    lmswap.disable(model)
