"""Draws the pages' pictures as SVG into docs/pictures, from stored plans and predictions.

`python docs/tools/pictures.py` draws them all again; equal data give equal files, but for the date in step.svg.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.programs.corpus import load_machine, load_program
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.planner import make_plan, simulate
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.picture import write_picture

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "pictures"

_INK, _FAINT, _GREY = "#22272b", "#c3c8cd", "#8a949e"
_BLUE, _ORANGE, _GREEN, _RED, _SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9"
_STYLE = {
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "lmswap",
}

# The step that pictures show: the case study's network at 192³ in what 144³ needs, on a machine that computes again
# and swaps.
PROGRAM, MACHINE, BUDGET_PERCENT = "unet3d_192", "h200_gen5", 42
_MAX_ROWS = 26


def main() -> None:
    """Draws every picture."""
    PICTURES.mkdir(exist_ok=True)
    program, machine = load_program(PROGRAM), load_machine(MACHINE)
    costs = roofline(program, machine)
    memory = StepMemory(program, costs)
    budget_bytes = memory.peak.nbytes * BUDGET_PERCENT // 100
    plan = make_plan("auto", program, costs, machine, budget_bytes=budget_bytes, tier="host", min_swap_bytes=2**20)
    with matplotlib.rc_context(_STYLE):
        _save(_stages(), "stages")
        _save(_trip(), "trip")
        _save(_budgets(), "budgets")
        _save(_buffers(program, machine, plan), "buffers")
        _save(_certificate(memory, plan), "certificate")
        timeline = simulate(program, costs, machine, plan)
        title = f"3D U-Net at 192³ in 42 % of its peak, on an {machine.name}: predicted, from rooflines"
        path = PICTURES / "step.svg"
        write_picture(path, [timeline], title=title, budget_bytes=budget_bytes, peak_bytes={})


def _save(figure: Figure, name: str) -> None:
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


def _stages() -> Figure:
    """The pipeline: packages, and what one passes to the next."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-0.15, 10.1), ylim=(0, 2.9))
    axes.axis("off")
    stages = [
        ("capture", "traces one\ntraining step"),
        ("analyze", "lifetimes and\nmemory curve"),
        ("planner", "keep, swap or\nrecompute"),
        ("rewrite", "inserts copies,\nrecomputation"),
        ("runtime", "runs ops,\nmoves bytes"),
        ("reporting", "predicted and\nmeasured"),
    ]
    passed = ["Program,\nOpCosts", "live ranges,\ngaps", "Plan", "graphs with\ncopies", "Timeline"]
    for number, (name, task) in enumerate(stages):
        _box(axes, (1.75 * number, 1.5, 1.2, 0.95), name, task)
    for number, what in enumerate(passed):
        _arrow(axes, (1.75 * number + 1.2, 1.97), (1.75 * (number + 1), 1.97))
        axes.text(1.75 * number + 1.475, 1.42, what, ha="center", va="top", fontsize=7.5, color=_BLUE)
    axes.annotate(
        "",
        (5.85, 0.75),
        (7.6, 1.5),
        arrowprops={"arrowstyle": "-", "color": _GREEN, "connectionstyle": "arc3,rad=-.15"},
    )
    axes.annotate(
        "",
        (4.1, 1.5),
        (5.85, 0.75),
        arrowprops={"arrowstyle": "->", "color": _GREEN, "connectionstyle": "arc3,rad=-.15"},
    )
    axes.text(
        5.85, 0.6, "after the third and fourth step: measured seconds and bytes", ha="center", va="top", color=_GREEN
    )
    axes.text(
        0.6,
        0.6,
        "ir: data types of all stages\nsession: joins them",
        ha="center",
        va="top",
        color=_GREY,
        fontsize=8.5,
    )
    return figure


def _box(axes: Axes, place: tuple[float, float, float, float], name: str, task: str) -> None:
    x, y, width, height = place
    style = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor="#eef2f5", edgecolor=_FAINT
    )
    axes.add_patch(style)
    axes.text(x + width / 2, y + height * 0.74, name, ha="center", va="center", fontweight="bold")
    axes.text(x + width / 2, y + height * 0.32, task, ha="center", va="center", fontsize=8)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": _INK, "shrinkA": 2, "shrinkB": 2})


def _trip() -> Figure:
    """One trip of a buffer: the four positions of a swap on the three lanes."""
    figure = Figure(figsize=(10, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-1.9, 12.4), ylim=(-0.5, 4.6))
    axes.axis("off")
    for row, label in ((3, "compute"), (2, "copies out"), (1, "copies in"), (0, "its memory")):
        axes.text(-0.15, row + 0.3, label, ha="right", va="center")
    for op in range(12):
        uses = op in (1, 10)
        axes.broken_barh([(op + 0.03, 0.94)], (3, 0.6), color=_BLUE if uses else _FAINT)
        axes.text(
            op + 0.5,
            3.3,
            "use" if uses else "op",
            ha="center",
            va="center",
            color="white" if uses else _INK,
            fontsize=8,
        )
    axes.broken_barh([(2, 2.6)], (2, 0.6), color=_ORANGE)
    axes.broken_barh([(7, 2.7)], (1, 0.6), color=_GREEN)
    axes.broken_barh([(1, 4), (7, 4)], (0, 0.6), color=_BLUE, alpha=0.3)
    axes.text(6, 0.3, "free for others", ha="center", va="center", color=_GREY, fontsize=9)
    for x, name, side in (
        (2, "out_start", "left"),
        (5, "release", "center"),
        (7, "in_start", "center"),
        (10, "first_use", "center"),
    ):
        axes.plot([x, x], [-0.15, 4.0], color=_INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.text(x, 4.1, name, ha="center" if side == "center" else side, va="bottom", fontweight="bold", fontsize=9)
    return figure


def _budgets() -> Figure:
    """Step over the step with unlimited memory by budget: the bound, auto, and each alone; on four machines."""
    outcomes = json.loads((ROOT / "benchmarks" / "results" / "programs.json").read_text(encoding="utf-8"))["outcomes"]
    panels = [
        ("unet3d_192", "v100_gen3", "V100, PCIe gen3, fp32"),
        ("unet3d_192", "h200_gen5", "H200, PCIe gen5, fp32"),
        ("unet3d_192_bf16", "h200_gen5_bf16", "H200, PCIe gen5, bf16"),
        ("unet3d_192", "gh200", "GH200, C2C, fp32"),
    ]
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    for axes, (program, machine, title) in zip(figure.subplots(2, 2, sharex=True).flat, panels, strict=True):
        _draw_policies(
            axes, [o for o in outcomes if (o["case"]["program"], o["case"]["machine"]) == (program, machine)]
        )
        axes.set_title(title, loc="left", fontweight="bold", fontsize=10)
    figure.axes[0].legend(frameon=False, loc="upper left")
    figure.supxlabel("budget, % of the unplanned peak", fontsize=10)
    figure.supylabel("step over unlimited memory", fontsize=10)
    return figure


def _draw_policies(axes: Axes, outcomes: list[dict[str, dict[str, float]]]) -> None:
    looks = [
        ("auto", "lmswap", _BLUE, 2.4),
        ("swap", "only swap", _ORANGE, 1.2),
        ("recompute", "only recompute", _GREEN, 1.2),
        ("tflms", "TFLMS policy", _INK, 1.2),
    ]
    for policy, label, colour, width in looks:
        rows = sorted(
            (o["case"]["budget_percent"], o["plan"]["step_seconds"] / o["free_seconds"])
            for o in outcomes
            if o["case"]["policy"] == policy and o["plan"]
        )
        axes.plot(
            *zip(*rows, strict=True),
            "o-",
            color=colour,
            linewidth=width,
            markersize=3.5,
            label=label,
            zorder=3 if policy == "auto" else 2,
        )
    bounds = sorted(
        (o["case"]["budget_percent"], o["plan"]["bound_seconds"] / o["free_seconds"])
        for o in outcomes
        if o["case"]["policy"] == "auto" and o["plan"]
    )
    percents, floor = zip(*bounds, strict=True)
    axes.fill_between(percents, 0, floor, color=_FAINT, alpha=0.6, linewidth=0, label="below the bound")
    axes.set_yscale("log")
    top = 1.05 * max(max(line.get_ydata()) for line in axes.get_lines())
    axes.set(xlim=(92, 18), ylim=(0.97, max(1.5, top)))
    ticks = [tick for tick in (1, 1.1, 1.25, 1.5, 2, 3, 5, 8) if tick <= max(1.5, top)]
    axes.set_yticks(ticks, [f"{tick:g} ×" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color=_FAINT, linewidth=0.5)


def _buffers(program: Program, machine: Machine, plan: Plan) -> Figure:
    """The largest buffers of the step over its ops: held, in transfer, swapped out; and recomputed."""
    runs = schedule(program, plan.recomputes)
    costs = runs.costs(roofline(program, machine))
    held = StepMemory(runs.program, costs).ranges
    starts = 1e3 * np.array(StepMemory(runs.program, costs).op_starts)
    lasting = [
        row
        for row in buffer_decisions(program, plan)
        if row.decision is not Decision.KEEP
        or starts[held[row.buffer].stop] - starts[held[row.buffer].start] > starts[-1] / 50
    ]
    largest = sorted(lasting, key=lambda row: (-row.nbytes, held[row.buffer].start))[:_MAX_ROWS]
    rows = sorted(largest, key=lambda row: held[row.buffer].start)
    copies = _copies_by_buffer(program, plan)
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        for copy in [row.buffer, *copies.get(row.buffer, [])]:
            own = held[copy]
            colour = _SKY if copy >= len(program.buffers) else _BLUE
            away = [swap for swap in plan.swaps if swap.buffer == copy]
            begin = own.start
            for swap in [*away, None]:
                end = swap.release if swap else own.stop
                axes.broken_barh([(starts[begin], starts[end] - starts[begin])], (y - 0.36, 0.72), color=colour)
                begin = swap.in_start if swap else end
    axes.set_yticks(range(len(rows)), [f"{row.decision}  {row.nbytes / 2**20:.0f} MiB" for row in rows], fontsize=7.5)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color({Decision.SWAP: _RED, Decision.RECOMPUTE: _GREEN, Decision.KEEP: _INK}[row.decision])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of compute from the start of the step, predicted")
    axes.axvline(
        starts[next(s.start for s in runs.program.segments if s.phase == "backward")], color=_GREY, linewidth=0.8
    )
    return figure


def _copies_by_buffer(program: Program, plan: Plan) -> dict[int, list[int]]:
    """The buffers of the schedule that recomputes make, by the program's buffer that they stand for."""
    made = [buffer for recompute in plan.recomputes for buffer in program.ops[recompute.op].writes]
    copies: dict[int, list[int]] = {}
    for number, buffer in enumerate(made):
        copies.setdefault(buffer, []).append(len(program.buffers) + number)
    return copies


def _certificate(memory: StepMemory, plan: Plan) -> Figure:
    """The unplanned memory curve, the budget, and the cuts with their prices."""
    assert plan.certificate is not None
    cuts, prices = plan.certificate.cuts, plan.certificate.memory_prices
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    curve, lanes = figure.subplots(2, sharex=True, height_ratios=[2.4, 1])
    starts = 1e3 * np.array(memory.op_starts)
    curve.step(starts[:-1], memory.curve / 2**30, where="post", color=_BLUE, linewidth=1.2)
    curve.fill_between(starts[:-1], memory.curve / 2**30, step="post", color=_BLUE, alpha=0.2, linewidth=0)
    curve.axhline(plan.budget_bytes / 2**30, color=_INK, linestyle=(0, (5, 3)), linewidth=1.2)
    curve.text(starts[-1], plan.budget_bytes / 2**30, "budget ", ha="right", va="bottom", fontweight="bold")
    dearest = max(prices) or 1.0
    for cut, price in zip(cuts, prices, strict=True):
        for axes in (curve, lanes):
            axes.axvline(starts[cut], color=_RED, linewidth=0.6 + 2.4 * price / dearest, alpha=0.8)
        if price > 0:
            curve.text(
                starts[cut],
                1.02,
                f"{price * 2**30 * 1e3:.2g}",
                transform=curve.get_xaxis_transform(),
                ha="center",
                color=_RED,
                fontsize=8,
            )
    curve.set_ylabel("memory, GiB")
    zones = [0.0, *(starts[cut] for cut in cuts), starts[-1]]
    certificate = plan.certificate
    for label, prices_of_zones, colour in (
        ("out", certificate.out_prices, _ORANGE),
        ("in", certificate.in_prices, _GREEN),
    ):
        lanes.stairs(prices_of_zones, zones, color=colour, linewidth=1.6, label=f"lane {label}")
    lanes.set(
        ylabel="price of a\nlane's second",
        xlabel="milliseconds of compute from the start of the step",
        ylim=(0, 1.4 * max(*certificate.out_prices, *certificate.in_prices)),
    )
    lanes.legend(frameon=False, loc="center right")
    curve.set_title("prices of memory at the cuts (red): ms per GiB\n", loc="left", fontsize=10, color=_RED)
    return figure


if __name__ == "__main__":
    main()
