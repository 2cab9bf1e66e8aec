"""A budget is kept from the first step on, with an optimizer, as the kernel counts resident memory."""

import json
import subprocess
import sys

import pytest


def run(model: str, policy: str, num_steps: int) -> dict:
    command = [sys.executable, "-m", "tests.resident_steps", model, policy, str(num_steps), "0.6"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "policy"), [("transformer", "recompute"), ("transformer", "swap"), ("unet3d", "auto")]
)
def test_resident_memory_grows_by_no_more_than_the_budget_in_five_steps(model, policy):
    figures = run(model, policy, num_steps=5)
    assert figures["recomputed_bytes"] + figures["swapped_out_bytes"] > 0
    assert max(figures["grown_bytes"]) <= figures["budget_bytes"]
