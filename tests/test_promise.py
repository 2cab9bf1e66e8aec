"""A budget is kept from the first step on, with an optimizer, as the kernel counts resident memory."""

import json
import subprocess
import sys

import pytest


def run(model: str, policy: str, num_steps: int, share: float) -> dict:
    command = [sys.executable, "-m", "tests.resident_steps", model, policy, str(num_steps), str(share)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "policy", "share"),
    [("transformer", "recompute", 0.6), ("transformer", "swap", 0.6), ("unet3d", "auto", 0.45)],
)
def test_resident_memory_grows_by_no_more_than_the_budget_in_five_steps(model, policy, share):
    figures = run(model, policy, num_steps=5, share=share)
    assert figures["recomputed_bytes"] + figures["swapped_out_bytes"] > 0
    assert max(figures["grown_bytes"]) <= figures["budget_bytes"]
