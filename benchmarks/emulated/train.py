"""The time of a step on the emulated GPU, and its prediction: one training, in a separate process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.compact import to_json
from benchmarks.emulated.device import start
from benchmarks.programs.models import Gpt
from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import UNet3d
from lmswap.ir.timeline import Lane
from tools.emulated_gpu import machine

_LEARNING_STEPS = 5  # after the fourth plans are final
_STEADY_STEPS = 5
_MIN_SWAP_BYTES = 2**16  # networks are small, and so are their tensors


class _WithLoss(nn.Module):
    """The loss is an op of the step then, as others."""

    def __init__(self, network: UNet3d) -> None:
        super().__init__()
        self.network = network

    def forward(self, scan: Tensor, truth: Tensor) -> Tensor:
        return weighted_dice_loss(self.network(scan), truth)


def _unet3d(side: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    truth = (torch.rand(1, 3, side, side, side) < 0.1).float()
    return _WithLoss(UNet3d(base_filters=8)), (torch.randn(1, 4, side, side, side), truth)


def _gpt(texts: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens, words = 128, 512
    text = torch.randint(words, (texts, tokens + 1))
    return Gpt(layers=4, width=128, heads=4, tokens=tokens, words=words), (
        text[:, :-1].contiguous(),
        text[:, 1:].clone(),
    )


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "unet3d_48": partial(_unet3d, 48),
    "unet3d_64": partial(_unet3d, 64),
    "gpt": partial(_gpt, 8),
}


def train(network: str, budget_bytes: int | None) -> dict[str, Any]:
    """Trains the first steps, by which lmswap calibrates, and steady ones; returns seconds and bytes for JSON."""
    torch.manual_seed(0)
    model, batch = NETWORKS[network]()
    model, batch = model.cuda(), tuple(tensor.cuda() for tensor in batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lmswap.enable(model, "auto" if budget_bytes is None else budget_bytes, min_swap_bytes=_MIN_SWAP_BYTES)
    steps = [_step(model, batch, optimizer) for _ in range(_LEARNING_STEPS + _STEADY_STEPS)]
    report = lmswap.report(model)
    return {
        "budget_bytes": budget_bytes,
        "fixed_bytes": report.base_bytes + report.reserve_bytes + report.margin_bytes,
        "planned_bytes": report.predicted_peak_bytes - report.base_bytes - report.reserve_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "free_seconds": report.free_seconds,
        "bound_seconds": report.bound_seconds,
        "notes": report.notes,
        "steps": steps,
        "steady": steps[_LEARNING_STEPS:],
    }


def _step(model: nn.Module, batch: tuple[Tensor, ...], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    machine.take_late_seconds()
    begun = time.perf_counter()
    before.record()
    model(*batch).backward()
    after.record()
    host_seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    late_seconds = machine.take_late_seconds()
    optimizer.step()
    optimizer.zero_grad()
    report = lmswap.report(model)
    predicted, measured = report.predicted, report.measured
    return {
        "emulated_seconds": before.elapsed_time(after) / 1e3,
        "predicted_seconds": report.predicted_seconds,
        "measured_seconds": report.measured_seconds,
        "host_seconds": host_seconds,
        "host_bound_seconds": report.host_bound_seconds,
        "late_seconds": late_seconds,
        "swapped_bytes": report.swapped_out_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "predicted_stall_seconds": predicted.lane_seconds(Lane.STALL) if predicted else None,
        "stall_seconds": report.stall_seconds,
        "num_swaps": len([span for span in measured.spans if span.lane is Lane.OUT]) if measured else 0,
    }


if __name__ == "__main__":
    file, network, budget = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache:
        start(Path(cache))
        Path(file).write_text(to_json(train(network, json.loads(budget))))
