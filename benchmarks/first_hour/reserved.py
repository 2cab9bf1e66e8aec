"""What does torch reserve from the driver beyond a budget, and on how small a card does the step still run?

A 3D U-Net in half of what it takes, by torch's native segments and by expandable ones, on cards of the budget and a
bit more. ``python -m benchmarks.first_hour.reserved FILE --size 192``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.compact import to_json
from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.fresh import RunFailed, warmed_up
from benchmarks.unet3d.preprocess import prepare_cube
from benchmarks.unet3d.run import Configuration, Run

_SHARE = 0.5
_CARDS = (None, 1.4, 1.2, 1.1, 1.0)  # of the budget; None: all there is
_SEGMENTS = {"native": "", "expandable": "expandable_segments:True"}


def study(size: int, folder: Path) -> dict[str, Any]:
    """All runs; the first, without a budget, says what half of it is."""
    synthetic.make_subjects(folder / "subjects", 1)
    (subject,) = brats.find_subjects(folder / "subjects")
    free = Configuration(
        size=size,
        steps=5,
        policy=None,
        budget_bytes=None,
        cap_bytes=None,
        head="conv",
        dtype="fp32",
        device="cuda",
        seed=0,
        cubes=(str(prepare_cube(subject, size, folder / "cubes")),),
    )
    unplanned = _run(free, folder, "")
    budget_bytes = int(_SHARE * unplanned.peak_bytes)
    runs = [
        {"segments": segments, "card": card, **_outcome(free, budget_bytes, card, folder, setting)}
        for segments, setting in _SEGMENTS.items()
        for card in _CARDS
    ]
    return {"device": unplanned.device, "size": size, "budget_bytes": budget_bytes, "runs": runs}


def _outcome(free: Configuration, budget_bytes: int, card: float | None, folder: Path, setting: str) -> dict[str, Any]:
    cap_bytes = int(card * budget_bytes) if card else None
    try:
        run = _run(replace(free, policy="auto", budget_bytes=budget_bytes, cap_bytes=cap_bytes), folder, setting)
    except RunFailed as failure:
        return {"failure": str(failure)[:300]}
    return {
        "allocated_bytes": run.tensor_peak_bytes,
        "reserved_bytes": run.reserved_peak_bytes,
        "seconds_per_step": run.seconds_per_step,
    }


def _run(configuration: Configuration, folder: Path, setting: str) -> Run:
    environment = {"PYTORCH_ALLOC_CONF": setting}
    with warmed_up(configuration, folder / "logs", lambda _, event: None, environment) as run:
        return run.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--size", type=int, default=96)
    options = parser.parse_args()
    options.result.write_text(to_json(study(options.size, options.result.parent)))
