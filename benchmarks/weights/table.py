"""Outcomes of the ways of each task → Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.weights.outcomes import LMSWAP, PLAIN
from lmswap.ir.bytesize import format_bytes

_COLUMNS = ("task", "way", "peak", "of the budget", "step, s", "over plain", "copied in", "bits")
_OF_LMSWAP = ("task", "peak: predicted", "measured", "seconds: predicted", "measured", "bound", "over the bound")


def lines(tasks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Two tables of what `asdict` makes of outcomes, by task: all ways, and lmswap's predictions."""
    found = [_line(_COLUMNS), _line("---" for _ in _COLUMNS)]
    found += [_line(cells) for task, outcomes in tasks.items() for cells in rows(task, outcomes)]
    predicted = [_line(cells) for task, outcomes in tasks.items() for cells in _predictions(task, outcomes)]
    return [*found, "", _line(_OF_LMSWAP), _line("---" for _ in _OF_LMSWAP), *predicted] if predicted else found


def rows(task: str, outcomes: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The cells of each way of a task."""
    plain = next((each for each in outcomes if each["run"]["way"] == PLAIN), None)
    for outcome in outcomes:
        run = outcome["run"]
        way = f"{run['way']}, {run['num_blocks']} blocks" if run["num_blocks"] else run["way"]
        if outcome is not plain and run["way"] == PLAIN:
            way = f"{PLAIN}, again"
        if outcome["status"] != "ran":
            yield [task, way, f"{outcome['status']}: {outcome['detail']}", *([""] * (len(_COLUMNS) - 3))]
            continue
        budget_bytes, read_bytes = run["budget_bytes"], outcome["read_bytes"]
        yield [
            task,
            way,
            format_bytes(outcome["peak_bytes"]),
            f"{outcome['peak_bytes'] / budget_bytes:.3f}" if budget_bytes else "–",
            f"{statistics.median(outcome['seconds']):.3f}",
            f"{over(outcome, plain):.3f} ×" if plain is not None and plain is not outcome else "–",
            format_bytes(round(read_bytes)) if read_bytes is not None else "–",
            "–" if plain is None or plain is outcome else bits(outcome, plain),
        ]


def over(outcome: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """Median of a way's seconds over plain torch's, turn by turn."""
    ratio: float = statistics.median(mine / its for mine, its in zip(outcome["seconds"], plain["seconds"], strict=True))
    return ratio


def bits(outcome: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """Whether each step's result and the trained parameters have plain torch's bits, and else from which step on."""
    steps = enumerate(zip(outcome["bits"], plain["bits"], strict=True), start=1)
    other = next((number for number, (mine, its) in steps if mine != its), None)
    if other is not None:
        return f"others from step {other} on"
    return "same" if outcome["trained"] == plain["trained"] else "others in the parameters"


def _predictions(task: str, outcomes: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for outcome in outcomes:
        report = outcome["report"]
        if outcome["run"]["way"] != LMSWAP or outcome["status"] != "ran":
            continue
        peaks = [format_bytes(report[name] or 0) for name in ("predicted_peak_bytes", "measured_peak_bytes")]
        predicted, measured, bound = (report[f"{name}_seconds"] or 0.0 for name in ("predicted", "measured", "bound"))
        above = f"{measured / bound:.3f} ×" if bound else "–"
        yield [task, *peaks, f"{predicted:.3f}", f"{measured:.3f}", f"{bound:.3f}", above]


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"
