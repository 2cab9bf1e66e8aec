"""The configuration of one process of the benchmark: what it trains, and how it is measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import cattrs

from benchmarks.unet3d.network import Head
from benchmarks.unet3d.recipe import Dtype

Kind = Literal["plain", "unswapped", "swapped", "swapped-only"]


@dataclass(frozen=True)
class Configuration:
    """What one process trains. ``policy`` None is plain eager torch; "none" is lmswap's graphs without swapping.

    The first ``warm_up_steps`` of ``steps`` are not among those whose seconds count. ``threads`` is torch's own choice
    if None. ``link``, with ``link_file`` for processes that share it, and ``tier`` are `lmswap.enable`'s; without
    ``counts_tensors`` the further step that counts what tensors alone hold on a CPU is left out. With ``takes_turns``
    each timed step waits until it is its turn. ``ranks`` processes train together, each with cubes of its own.
    """

    size: int
    steps: int
    policy: str | None
    budget_bytes: int | None
    cap_bytes: int | None  # on CUDA: what torch's allocator may take from the driver
    head: Head
    dtype: Dtype
    device: str
    seed: int
    cubes: tuple[str, ...]
    warm_up_steps: int = 1
    threads: int | None = None
    link: str | None = None
    link_file: str | None = None
    tier: str = "auto"
    counts_tensors: bool = True
    takes_turns: bool = False
    ranks: int = 1

    @property
    def kind(self) -> Kind:
        """Which of the four ways to run a size this is; "swapped-only" recomputes nothing."""
        match self.policy:
            case None:
                return "plain"
            case "none":
                return "unswapped"
            case "swap":
                return "swapped-only"
            case _:
                return "swapped"

    @property
    def name(self) -> str:
        """What tables and pictures call it."""
        return f"{self.size}³ {self.kind}" + (f", {self.link}" if self.link else "")

    @staticmethod
    def from_json(text: str) -> Configuration:
        """Reads what `json.dumps(asdict(...))` wrote."""
        return cattrs.structure(json.loads(text), Configuration)
