"""The machine is measured for plans that move tensors, and for no others."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import lmswap
from lmswap.hardware import measure
from lmswap.ir.machine import Machine
from tests.models import LARGE, tight_budget

NEW_PROCESS = """
import os, sys, torch, lmswap
model = lmswap.enable(torch.nn.Linear(64, 64), budget="1GiB")
model(torch.ones(4, 64)).sum().backward()
assert lmswap.report(model).plan_origin.startswith("made in")
assert not [name for name in os.listdir(os.environ["LMSWAP_CACHE_DIR"]) if name.startswith("machine")]
assert "scipy.optimize" not in sys.modules
"""


@pytest.fixture
def measured(monkeypatch, tmp_path, device):
    """The tiers that are measured; nothing is cached at first."""
    if device.type != "cpu":
        pytest.skip("a GPU is measured at once: its launch overhead is part of each prediction")
    machine, found = measure.describe_machine(device, "disk"), []

    def count(_device, tier, _where):
        found.append(tier)
        assert type(torch.ones(2, 2) @ torch.ones(2, 2)) is torch.Tensor  # real, also in the middle of a trace
        return replace(machine, flops_per_second=3.5e10)

    monkeypatch.setattr(measure, "_measure_machine", count)
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))
    return found


def train(*, num_steps=1, **options):
    """A model and its report after a few steps."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(LARGE.make(), **options)
    for _ in range(num_steps):
        model.zero_grad()
        LARGE.loss(model(LARGE.batch())).backward()
    return model, lmswap.report(model)


def machine_of_saved_plan(model, path) -> Machine:
    lmswap.save_plan(model, path)
    (step,) = json.loads(path.read_text())["steps"]
    return Machine.from_json(json.dumps(step["machine"]))


def test_a_step_that_fits_measures_no_machine(measured, tmp_path):
    model, report = train(budget="4GiB", num_steps=5)
    assert measured == []
    assert report.predicted_seconds > 0
    path = tmp_path / "plan.json"
    assert not machine_of_saved_plan(model, path).is_measured  # the file claims no measured rates
    lmswap.disable(model)
    model, again = train(budget="4GiB")
    assert again.plan_origin == "from cache"
    lmswap.disable(model)
    train(plan=str(path))
    assert measured == []


def test_a_step_that_swaps_measures_the_machine_once(measured, tmp_path):
    for _ in range(2):  # a process's first trace leaves memory in use that later ones do not
        model, report = train(budget="4GiB")
        lmswap.disable(model)
    budget = tight_budget(report, 0.8)
    model, report = train(budget=budget)
    assert measured == ["disk"]
    assert report.swapped_out_bytes or report.recomputed_bytes
    found = machine_of_saved_plan(model, tmp_path / "plan.json")
    assert found.is_measured and found.flops_per_second == 3.5e10
    lmswap.disable(model)
    _, again = train(budget=budget)  # measured by an earlier process, as it were, and so was its plan
    assert again.plan_origin == "from cache"
    assert measured == ["disk"]


def test_a_policy_that_always_moves_tensors_measures_at_once(measured):
    lmswap.enable(LARGE.make(), budget="4GiB", policy="swap_all")
    assert measured == ["disk"]


def test_a_new_process_whose_step_fits_imports_and_measures_nothing_for_plans(device, tmp_path, monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path))
    if device.type == "cpu":
        subprocess.run([sys.executable, "-c", NEW_PROCESS], check=True)
