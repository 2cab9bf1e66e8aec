"""Trains one model in a process of its own and prints, as JSON, what its memory did: `python -m` with its arguments.

    python -m tests.session.resident_steps MODEL POLICY NUM_STEPS SHARE

The budget leaves the step SHARE of what it would hold unplanned. Resident bytes are read from the kernel, not lmswap.
"""

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn

import lmswap
from benchmarks.unet3d.network import UNet3d
from lmswap.planner import import_search
from tests.models import Case, Encoder, tight_budget

MODELS = {
    "unet3d": Case(lambda: UNet3d(base_filters=4), lambda: torch.randn(1, 4, 48, 48, 48)),
    "transformer": Case(Encoder, lambda: torch.randint(0, 50, (32, 256))),
}


def main(name: str, policy: str, num_steps: str, share: str) -> None:
    case = MODELS[name]
    probe = lmswap.enable(case.make(), policy="none")
    step(case, probe)  # what plain torch, `enable` and the first search load is not counted
    import_search()
    budget_bytes = tight_budget(lmswap.report(probe), float(share))
    lmswap.disable(probe)
    del probe

    torch.compiler.reset()
    model = lmswap.enable(case.make(), budget=budget_bytes, policy=policy)
    optimizer = torch.optim.Adam(model.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = status_bytes("VmRSS")
    grown, moved = [], []
    for _ in range(int(num_steps)):
        step(case, model)
        optimizer.step()
        optimizer.zero_grad()
        grown.append(status_bytes("VmHWM") - before_bytes)
        report = lmswap.report(model)
        moved.append(report.swapped_out_bytes + report.recomputed_bytes)
    text = json.dumps({"grown_bytes": grown, "moved_bytes": moved, "budget_bytes": report.budget_bytes})
    sys.stdout.write(f"{text}\n")


def step(case: Case, model: nn.Module) -> None:
    case.loss(model(case.batch())).backward()


def status_bytes(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
