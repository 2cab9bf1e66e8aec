"""A run of one way of a task, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

PLAIN, LMSWAP = "plain", "lmswap"


@dataclass(frozen=True)
class Steps:
    """How many steps warm up (plans are final after the fifth), follow each other, and are timed in turns."""

    warm_up: int = 5
    steady: int = 3
    timed: int = 5


@dataclass(frozen=True)
class Run:
    """What is run: a task in a size, a way, and its limits."""

    task: str
    size: str
    tokens: int | None
    way: str
    device: str
    budget_bytes: int | None = None
    bytes_per_second: float | None = None
    num_blocks: int = 0
    steps: Steps = Steps()


@dataclass(frozen=True)
class Outcome:
    """What came of a run: "ran", "infeasible", with the least budget in ``detail``, or "failed".

    Peaks are of the steps after the warm-up: growth of the process since before the model was made (CPU), or what torch
    reserved (CUDA). ``seconds`` are of the steps in turns. ``bits`` are digests of each step's loss, or of outputs
    where nothing is trained; ``trained`` is one of all trained parameters at the end.
    """

    run: Run
    status: str
    detail: str = ""
    peak_bytes: int | None = None
    seconds: tuple[float, ...] = ()
    read_bytes: float | None = None  # copied in, by step
    bits: tuple[str, ...] = ()
    trained: str = ""
    report: dict[str, Any] = field(default_factory=dict)  # lmswap's own

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """The outcome of which `dataclasses.asdict` made ``fields``, by way of JSON."""
        run = Run(**{**fields["run"], "steps": Steps(**fields["run"]["steps"])})
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists, "run": run})
