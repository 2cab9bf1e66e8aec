"""IBM's measurements in the case study, as data.

Source: the TFLMS case study of July 2018, a 3D U-Net on BraTS 2017 in TensorFlow with Large Model Support on V100 GPUs
of 16 GB: 144³ without swapping, 192³ with it, batch 1, 228 training steps an epoch. Ratios of transfer to compute time
are derived: what a step moves one way (24.3 and 20.1 GB), over the link's measured rate, over the 0.63 s that its
forward pass computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SMALL, LARGE = 144, 192
STEPS_PER_EPOCH = 228  # training subjects; batch 1

# Epoch seconds, "Tables 2, 3 and 5": what is trained at once. No machine ran all of them.
EpochRow = Literal["small", "small_each", "large", "large_each", "large_contended"]


@dataclass(frozen=True)
class Rates:
    """A row of Tables 4 and 6, profiled over steps 20 to 50 of the second epoch; bytes per second."""

    utilization: float
    in_bytes_per_second: float
    out_bytes_per_second: float


@dataclass(frozen=True)
class System:
    """One of the two machines. ``ratio`` is transfer time over compute time of a forward pass that saves everything.

    ``alone`` are its rates with a link for each GPU. With more GPUs (``contended``) two share a bus on x86; on the
    AC922 each has a slower link, of ``contended_share`` of the rate.
    """

    key: str
    name: str
    ratio: float
    epoch_seconds: dict[EpochRow, float]
    alone: Rates
    contended: Rates
    contended_how: str
    contended_share: float | None = None

    @property
    def overhead(self) -> float:
        """Seconds per voxel of a swapped epoch at 192³ over those of one at 144³ without swapping."""
        return self.epoch_seconds["large"] / (self.epoch_seconds["small"] * (LARGE / SMALL) ** 3)


X86 = System(
    "x86",
    "x86, PCIe gen3",
    ratio=3.3,
    epoch_seconds={"small": 216, "small_each": 219, "large": 1467, "large_each": 1506, "large_contended": 2076},
    alone=Rates(0.291, 10.9e9, 11.7e9),
    contended=Rates(0.226, 7.6e9, 8.2e9),
    contended_how="two GPUs a bus",
)
AC922 = System(
    "ac922",
    "AC922, NVLink 2.0",
    ratio=0.5,
    epoch_seconds={"small": 197, "small_each": 200, "large": 590, "large_each": 600, "large_contended": 676},
    alone=Rates(0.735, 64.4e9, 60.4e9),
    contended=Rates(0.663, 45.8e9, 43.5e9),
    contended_how="six GPUs, links of 100 instead of 150 GB/s",
    contended_share=100 / 150,
)
SYSTEMS = (X86, AC922)

# Trainings at once in the rows of several.
EPOCH_ROWS: dict[EpochRow, str] = {
    "small": "1 × {small}³, no swapping",
    "small_each": "{many} × {small}³, no swapping (IBM: 4, a bus each)",
    "large": "1 × {large}³, swapping",
    "large_each": "{many} × {large}³, swapping, a link each (IBM: 4)",
    "large_contended": "{many} × {large}³, swapping, more than there are links for (IBM: 8, 6)",
}

# Table 7: epoch seconds at 192³, swapping, by GPUs that train together; 4 a node, 100 Gb/s InfiniBand between nodes.
EPOCH_SECONDS_TOGETHER = {1: 590, 4: 150, 8: 76, 16: 40}

# Table 1: boxes around the brains of BraTS 2017, in voxels.
BOXES = {"mean": (140, 171, 140), "median": (140, 171, 140), "min": (124, 151, 121), "max": (159, 191, 150)}

# What this project set itself to reach at those ratios.
OVERHEAD_GOALS = {"x86": 1.05, "ac922": 1.03}
UTILIZATION_GOAL = 0.95
