"""Ops of a 3D U-Net that are not bitwise repeatable, also from a second thread.

With cuDNN's benchmark, which each thread does for itself, and without it: ``python -m benchmarks.first_hour.repeats``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lmswap
from benchmarks.compact import to_json
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.network import UNet3d


def repeats(size: int) -> dict[str, Any]:
    """By cuDNN setting: the number of ops, and by operator of those that are not bitwise repeatable."""
    found = {}
    for benchmark in (False, True):
        torch.backends.cudnn.benchmark = benchmark
        torch.compiler.reset()
        model = lmswap.enable(UNet3d().cuda(), policy="none")
        # What plans take for granted where cuDNN's benchmark is on is not to hide what was found.
        with mock.patch("lmswap.capture.lower._chooses_by_thread", return_value=False):
            model(torch.ones(1, 4, size, size, size, device="cuda")).sum().backward()
        ops = [op for op in lmswap.program(model).ops if op.writes and not op.target.startswith("lmswap")]
        found["benchmark" if benchmark else "default"] = {
            "ops": len(ops),
            "not_repeated": Counter(op.target for op in ops if not op.is_repeatable),
        }
        lmswap.disable(model)
    return {"device": torch.cuda.get_device_name(), "size": size, **found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--size", type=int, default=96)
    options = parser.parse_args()
    write_text(options.result, to_json(repeats(options.size)))
