"""One training step as a picture: memory over time, plain and swapped, and the copies that make the difference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.unet3d.measured import Run
from benchmarks.unet3d.study import Study
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.timeline import Lane

GIB = 2**30

# Okabe and Ito's palette, which colour-blind readers can distinguish; the same as in lmswap's own pictures.
_LANES = {Lane.OUT: ("swap out", "#e69f00"), Lane.IN: ("swap in", "#009e73"), Lane.STALL: ("stalled", "#d55e00")}
_MEMORY, _EXCESS, _INK, _FAINT = "#0072b2", "#cc79a7", "#22272b", "#c3c8cd"


def plot_step(study: Study, size: int, path: Path) -> None:
    """Draws the last step of the plain and the swapped runs of ``size`` on one scale; a run that failed is left out.

    The copies are those of the last of them.

    Raises:
        ValueError: none of these runs finished.
    """
    runs = drawn_runs(study, size)
    swapped = _budgeted(runs)
    if not runs:
        raise ValueError(f"no run of {size}³ finished, so there is nothing to draw")
    with matplotlib.rc_context({"font.size": 10, "text.color": _INK, "axes.labelcolor": _INK}):
        figure = Figure(figsize=(10.5, 1.2 + 2.6 * len(runs) + 1.1 * bool(swapped)), layout="constrained")
        ratios = [2.6] * len(runs) + [0.9] * bool(swapped)
        axes = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        figure.suptitle(_title(study, size), x=0.01, ha="left", fontsize=13, fontweight="bold")
        top = 1.18 * max([study.budget_bytes or 0, *(run.peak_bytes for run in runs)]) / GIB
        end = max(_end(run) for run in runs)
        axes[-1].set_xlim(0, end)
        for axis, run in zip(axes, runs, strict=False):
            _draw_memory(axis, run, top)
            if study.budget_bytes is not None:
                _draw_budget(axis, run, study.budget_bytes / GIB, end)
        if swapped:
            _draw_lanes(axes[-1], swapped[-1])
        axes[-1].set_xlabel("seconds from the start of the step")
        figure.text(0.01, -0.02, _footnote(study, runs[0]), fontsize=8, color="#5b646c", va="top")
        figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.15)


def drawn_runs(study: Study, size: int) -> list[Run]:
    """Return the runs of ``size`` that `plot_step` draws."""
    return [run for run in study.runs if run.configuration.size == size and run.configuration.kind != "unswapped"]


def _budgeted(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.configuration.budget_bytes is not None]


def _title(study: Study, size: int) -> str:
    first, swapped = study.runs[0], _budgeted(drawn_runs(study, size))
    where = f" on {study.gpu}" if study.gpu else ""
    if study.budget_bytes != first.peak_bytes or first.configuration.size == size:
        return f"One training step at {size}³{where}"
    small = first.configuration.size
    factor = f"One training step at {size}³{where}, {(size / small) ** 3:.2f} × the voxels"
    is_within = swapped and all(run.peak_bytes <= study.budget_bytes for run in swapped)
    return f"{factor}, in the memory of {small}³" if is_within else f"{factor} of {small}³"


def _footnote(study: Study, run: Run) -> str:
    what = (
        "tensors on the device, peaks of what is reserved there"
        if run.configuration.device == "cuda"
        else "growth of the process's resident memory"
    )
    threads = f"{run.threads} thread{'s' * (run.threads > 1)}"
    device = run.device if run.configuration.device == "cuda" else f"{study.machine.cpu}, {threads}"
    return (
        f"3D U-Net of Isensee 2017, {run.configuration.dtype}, batch 1; {study.data}. Memory: {what}, last of "
        f"{run.configuration.steps} steps.\n{device}, torch {study.machine.torch}."
    )


def _end(run: Run) -> float:
    return run.memory[-1][0] if run.memory else run.step_seconds[-1]


def _draw_memory(axes: Axes, run: Run, top: float) -> None:
    _clear_frame(axes)
    axes.set_ylim(0, top)
    axes.set_ylabel("memory, GiB")
    axes.grid(axis="y", color=_FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_title(_heading(run), loc="left", fontsize=10.5)
    axes.fill_between(*_curve(run.memory), color=_MEMORY, alpha=0.22, linewidth=0)
    axes.plot(*_curve(run.memory), color=_MEMORY, linewidth=1.1)
    tensors = run.swapping.tensor_memory if run.swapping is not None else ()
    if tensors and tensors != run.memory:
        axes.fill_between(*_curve(tensors), step="post", color=_MEMORY, alpha=0.3, linewidth=0)
        axes.set_title("dark: held by tensors; light: other memory of the process", loc="right", fontsize=8.5)


def _heading(run: Run) -> str:
    again_bytes = (run.swapping.recomputed_bytes or 0) if run.swapping is not None else 0
    again = f"; {format_bytes(again_bytes)} recomputed" if again_bytes else ""
    return f"{run.configuration.name}: peak {format_bytes(run.peak_bytes)}{again}"


def _curve(samples: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    return [seconds for seconds, _ in samples], [nbytes / GIB for _, nbytes in samples]


def _draw_budget(axes: Axes, run: Run, budget: float, end_seconds: float) -> None:
    axes.axhline(budget, color=_INK, linewidth=1.2, linestyle=(0, (5, 3)))
    axes.annotate(
        f"budget {format_bytes(budget * GIB)}",
        (1, budget),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontweight="bold",
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1},
    )
    seconds, held = _curve(run.memory)
    above = [nbytes > budget for nbytes in held]
    axes.fill_between(seconds, held, budget, where=above, color=_EXCESS, alpha=0.45, linewidth=0, interpolate=True)
    over = [(at, nbytes - budget) for at, nbytes in zip(seconds, held, strict=True) if nbytes > budget]
    if over and over[-1][0] - over[0][0] > 0.15 * end_seconds:  # room for the words, where most is over
        excess = sum(nbytes for _, nbytes in over)
        center = sum(at * nbytes for at, nbytes in over) / excess
        height = budget + 0.25 * (max(held) - budget)
        axes.text(center, height, "over the budget", ha="center", va="center", color=_INK)


def _draw_lanes(axes: Axes, run: Run) -> None:
    _clear_frame(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    labels = []
    spans = run.swapping.timeline.spans if run.swapping else ()
    for row, (lane, (name, colour)) in enumerate(_LANES.items()):
        own = [(span.start_seconds, span.end_seconds, span.nbytes) for span in spans if span.lane is lane]
        axes.axhline(row, color=_FAINT, linewidth=0.5, zorder=0)
        axes.broken_barh(
            [(start, end - start) for start, end, _ in own], (row - 0.34, 0.68), facecolors=colour, linewidth=0
        )
        labels.append(f"{name}  {_amount(lane, own)}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)


def _amount(lane: Lane, spans: Sequence[tuple[float, float, int]]) -> str:
    if lane is Lane.STALL:
        return f"{sum(end - start for start, end, _ in spans):.1f} s"
    return format_bytes(sum(nbytes for _, _, nbytes in spans))


def _clear_frame(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
