"""Prints the content of docs/report.md: an example's report, explanation and picture, measured where this runs.

`python docs/tools/report.py` prints both texts and draws docs/pictures/report.svg; the page has them by hand.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import lmswap

ROOT = Path(__file__).parent.parent.parent
SIDE, BUDGET, STEPS = 64, "350MiB", 8  # after the fourth step the plan is final


def main() -> None:
    """Trains as examples/unet3d_volume.py does, on one thread: its seconds repeat better than those of several."""
    sys.path.insert(0, str(ROOT))
    example = importlib.import_module("examples.unet3d_volume")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = example.train(example.read_volume(None, SIDE), BUDGET, STEPS)
    report = lmswap.report(model)
    sys.stdout.write(f"{report}\n\n{lmswap.explain(model)}\n")
    report.plot(ROOT / "docs" / "pictures" / "report.svg")
    lmswap.disable(model)


if __name__ == "__main__":
    main()
