"""Formatting of figures in table cells, and columns that several tables share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.case_study.published import SYSTEMS
from benchmarks.case_study.ratios import Spread, overhead
from benchmarks.case_study.results import LinkRuns, Results
from benchmarks.unet3d.measured import Run
from lmswap.profiling.figures import Figures

NOT_YET = "not yet measured"
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """``rows`` have a cell for each of ``headings``, or two: then the second stands for all of them.

    ``note`` says what the figures are and what they are not.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def utilization(runs: Sequence[Run]) -> float | None:
    """Median share, 0 to 1, of the measured window in which the device computes; None where no run was profiled."""
    return median_of([run.figures for run in runs if run.figures is not None], lambda figures: figures.utilization)


def median_of(figures: Sequence[Figures], value: Callable[[Figures], float | None]) -> float | None:
    """The median of a value over the figures that have it; None if none has."""
    values = [found for found in map(value, figures) if found is not None]
    return statistics.median(values) if values else None


def times(spread: Spread | None) -> str:
    """Formats a ratio with its spread: "1.050 × [1.040, 1.060]"; "–" for None."""
    if spread is None:
        return NOTHING
    brackets = f" [{spread.low:.3f}, {spread.high:.3f}]" if spread.num > 1 else ""
    return f"{spread.median:.3f} ×{brackets}"


def percent(share: float | None) -> str:
    """Formats a share, 0 to 1, in per cent; "–" for None."""
    return NOTHING if share is None else f"{share:.1%}".replace("%", " %")


def ratio_name(link: LinkRuns) -> str:
    """Name of a link: its ratio of transfer to compute time, and the system that it represents."""
    system = next((system for system in SYSTEMS if system.key == link.name), None)
    if system is None:
        return f"{link.ratio:.2g} ({link.name})"
    return f"{system.ratio} ({system.name})" if link.link else f"{link.ratio:.2g} (for {system.ratio}, {system.name})"


def link_overhead(results: Results, name: str, policy: str = "auto") -> Spread | None:
    """Step time of the large size over the link ``name`` relative to unlimited memory; None where it was not run."""
    link = results.links.of(name) if results.links else None
    return overhead(link.of(policy), results.links.unswapped) if link and results.links else None
