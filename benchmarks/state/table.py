"""Outcomes of the ways of each task → Markdown, and which of lmswap's goals are reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.state.tasks import TASKS
from benchmarks.state.training import FIRST, LOAD, SAVE, STEPS
from benchmarks.state.ways import WAYS
from benchmarks.weights import table as weights
from benchmarks.weights.outcomes import LMSWAP, PLAIN
from lmswap.ir.bytesize import format_bytes

_MAX_OVER_PLAIN, _MAX_OVER_BOUND = 1.15, 1.05
_PHASES = (FIRST, STEPS, SAVE, LOAD)
_COLUMNS = ("task", "way", *_PHASES, "update, s", "remark")
_GOALS = ("task", "bits", "largest peak of the budget", "step over plain", "or over the bound", "goals")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Goals:
    """What lmswap reaches in a task: bits, the largest peak over the budget, and seconds over plain torch's and bound.

    `over_bound` is None without a bound.
    """

    bits: str
    peak_share: float
    over_plain: float
    over_bound: float | None

    @property
    def missed(self) -> list[str]:
        """Names of those that are not reached."""
        is_fast = self.over_plain <= _MAX_OVER_PLAIN or (
            self.over_bound is not None and self.over_bound <= _MAX_OVER_BOUND
        )
        reached = {"bits": self.bits == "same", "peak": self.peak_share <= 1, "seconds": is_fast}
        return [name for name, is_reached in reached.items() if not is_reached]


def goals(outcomes: Sequence[Record]) -> Goals | None:
    """Those of a task's lmswap; None if it did not run."""
    plain = next((each for each in outcomes if each["run"]["way"] == PLAIN and each["status"] == "ran"), None)
    mine = next((each for each in outcomes if each["run"]["way"] == LMSWAP and each["status"] == "ran"), None)
    if plain is None or mine is None:
        return None
    bound_seconds = _bound_seconds(mine, plain)
    return Goals(
        weights.bits(mine, plain),
        max(mine["peaks"].values()) / mine["run"]["budget_bytes"],
        weights.over(mine, plain),
        statistics.median(mine["seconds"]) / bound_seconds if bound_seconds is not None else None,
    )


def _bound_seconds(mine: Record, plain: Record) -> float | None:
    """Seconds that no step of ``mine`` can be below: those of its graphs by their certificate, and of the update.

    An update begins when all gradients exist, and reads parameters, gradients and state: what of these exceeds the
    budget has to be copied in before it ends. It takes as long as plain torch's at least.
    """
    run, graph_seconds = mine["run"], mine["report"]["bound_seconds"]
    if not graph_seconds:
        return None
    task = TASKS[run["task"]][run["size"]]
    read_bytes = mine["state_bytes"] * (2 + task.num_values) / task.num_values
    copied_bytes, rate = max(0.0, read_bytes - run["budget_bytes"]), run["bytes_per_second"]
    update_seconds = max(statistics.median(plain["update_seconds"]), copied_bytes / rate if rate else 0.0)
    return float(task.micro_batches * graph_seconds + update_seconds)


def lines(tasks: Mapping[str, Sequence[Record]]) -> list[str]:
    """All tables in Markdown; ``tasks`` are what `asdict` makes of outcomes, by title."""
    found = weights.lines(tasks)
    for table in (_phases(tasks), _reached(tasks)):
        found += ["", *(f"| {' | '.join(row)} |" for row in (table[0], ["---"] * len(table[0]), *table[1:]))]
    return found


def _phases(tasks: Mapping[str, Sequence[Record]]) -> list[list[str]]:
    rows = [[*_COLUMNS]]
    for task, outcomes in tasks.items():
        for outcome in (each for each in outcomes if each["status"] == "ran"):
            way, peaks = outcome["run"]["way"], outcome["peaks"]
            cells = [format_bytes(peaks[phase]) if phase in peaks else "–" for phase in _PHASES]
            update = f"{statistics.median(outcome['update_seconds']):.3f}"
            rows.append([task, way, *cells, update, WAYS[way].remark])
    return rows


def _reached(tasks: Mapping[str, Sequence[Record]]) -> list[list[str]]:
    rows = [[*_GOALS]]
    for task, outcomes in tasks.items():
        if (found := goals(outcomes)) is not None:
            over_bound = f"{found.over_bound:.3f} ×" if found.over_bound is not None else "–"
            missed = f"missed: {', '.join(found.missed)}" if found.missed else "reached"
            rows.append([task, found.bits, f"{found.peak_share:.3f}", f"{found.over_plain:.3f} ×", over_bound, missed])
    return rows
