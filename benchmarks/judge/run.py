"""One run of the judge in a process of its own: ``python -m benchmarks.judge.run NAME STEPS [BUDGET]``; prints JSON.

Without a budget the network is trained by plain torch. "least" finds the least budget that is accepted, by one call.
Peaks are of the growth of resident memory since `lmswap.enable`, or since the optimizer was made without it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from typing import Any

import torch
from torch import nn

import lmswap
from benchmarks.judge.networks import Network, network_called
from benchmarks.unet3d.memory import import_lmswap
from lmswap.errors import PlanInfeasible
from lmswap.hardware.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from lmswap.hardware.memory import device_memory


def main(argv: list[str] | None = None) -> int:
    """Runs one network; what came of it goes to standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge.run", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("steps", type=int)
    parser.add_argument("budget", nargs="?")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = network_called(options.name)
    model = network.make()
    try:
        figures = _least(network, model) if options.budget == "least" else _train(network, model, options)
    except PlanInfeasible as refusal:
        figures = {"refused": str(refusal), "needed_bytes": refusal.needed_bytes}
    sys.stdout.write(f"{json.dumps(figures)}\n")
    return 0


def _least(network: Network, model: nn.Module) -> dict[str, Any]:
    lmswap.enable(model, budget="auto")
    optimizer = network.optimizer(model)  # whose state is reserved
    model(network.batch())
    del optimizer
    report = lmswap.report(model)
    return {"least_bytes": lmswap.least_budget(model), "unplanned_bytes": report.unplanned_peak_bytes}


def _train(network: Network, model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # what the first optimizer of a process loads is no training
    gc.collect()
    if options.budget is not None:
        import_lmswap()
        lmswap.enable(model, budget=options.budget)
    # Plain torch keeps its allocator; lmswap's readings have resets in between, for which its own observers provide.
    memory = None if options.budget is None else device_memory(torch.device("cpu"))
    before_bytes = resident_bytes()
    optimizer = network.optimizer(model)
    if memory is None:
        reset_peak_resident()
    digest = hashlib.sha256()
    for step in range(options.steps):
        torch.manual_seed(step)
        loss = model(network.batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
    figures: dict[str, Any]  # before the weights are copied for the digest, which the last step's peak would include
    if memory is None:
        figures = {"grown_bytes": peak_resident_bytes() - before_bytes}
    else:
        report = lmswap.report(model)
        names = ("budget_bytes", "measured_peak_bytes", "highest_peak_bytes", "predicted_peak_bytes")
        names += ("measured_seconds", "predicted_seconds", "swapped_out_bytes", "recomputed_bytes")
        figures = {"grown_bytes": memory.lap_peaks()[0]} | {name: getattr(report, name) for name in names}
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return figures | {"digest": digest.hexdigest()}


if __name__ == "__main__":
    sys.exit(main())
