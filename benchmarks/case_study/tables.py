"""Comparison with IBM: the case study's tables, each cell with IBM's figure, ours and their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks.case_study import published
from benchmarks.case_study.cells import (
    NOT_YET,
    NOTHING,
    Table,
    link_overhead,
    median_of,
    percent,
    ratio_name,
    times,
    utilization,
)
from benchmarks.case_study.predict import FIRST_TFLMS, MACHINE_OF_SYSTEM, MACHINES, OURS
from benchmarks.case_study.published import EPOCH_ROWS, STEPS_PER_EPOCH, SYSTEMS
from benchmarks.case_study.results import Results, Together


def goals(results: Results) -> Table:
    """Goals and results: overhead and utilization at the case study's ratios of transfer to compute time."""
    rows: list[tuple[str, ...]] = []
    for system in SYSTEMS:
        link = results.links.of(system.key) if results.links else None
        cost, busy = link_overhead(results, system.key), utilization(link.of("auto")) if link else None
        at = ratio_name(link) if link else f"{system.ratio} ({system.name})"
        goal = published.OVERHEAD_GOALS[system.key]
        rows.append(
            (f"overhead at {at}", f"{system.overhead:.2f} ×", f"≤ {goal:.2f} ×", times(cost),
             _ratio(cost.median if cost else None, system.overhead),
             _reached(cost.median <= goal if cost else None))
        )  # fmt: skip
        goal = published.UTILIZATION_GOAL
        rows.append(
            (f"utilization at {at}", percent(system.alone.utilization), f"≥ {percent(goal)}", percent(busy),
             _ratio(busy, system.alone.utilization), _reached(busy >= goal if busy is not None else None))
        )  # fmt: skip
    if results.settings.device == "cpu":
        rows.append(("on a GPU", NOT_YET))
    return Table(
        f"{results.settings.large}³ in the memory of {results.settings.small}³, beside unlimited memory",
        ("", "IBM", "goal", "ours", "ours / IBM", "reached"),
        tuple(rows),
        "IBM's overhead is its epoch at 192³ over 2.37 times its epoch at 144³. Ours is the median over repeats of the "
        "step over that of the same graphs with unlimited memory, in turns with it; in brackets the lowest and the "
        "highest. Utilization: time in which the device computes, over the measured window.",
    )


def box_table(results: Results) -> Table | None:
    """Table 1: bounding boxes of brains, published and here; None before that stage has run."""
    if results.boxes is None:
        return None
    axes = list(zip(*results.boxes.sides, strict=True))
    reduce: dict[str, Callable[[Sequence[int]], float]] = {
        "mean": statistics.fmean, "median": statistics.median, "min": min, "max": max
    }  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for name, function in reduce.items():
        cells = [_beside(float(theirs), function(axis), "{:.0f}".format) for theirs, axis in
                 zip(published.BOXES[name], axes, strict=True)]  # fmt: skip
        rows.append((name, *cells))
    made = " Made subjects are stretched to boxes like those of Table 1, so that this compares only how."
    return Table(
        "Table 1: boxes around the brains, in voxels",
        ("", "X", "Y", "Z"),
        tuple(rows),
        f"In each cell IBM's figure | ours | ratio. Ours: {len(results.boxes.sides)} subjects, {results.origin.data}."
        + (made if "synthetic" in results.origin.data else ""),
    )


def epoch_table(results: Results) -> Table | None:
    """Tables 2, 3 and 5: seconds per epoch of trainings that share a link; None before that stage has run."""
    replicas, settings = results.replicas, results.settings
    if replicas is None:
        return None
    rows: list[tuple[str, ...]] = []
    for row, title in EPOCH_ROWS.items():
        cells = [title.format(many=settings.replicas, small=settings.small, large=settings.large)]
        for system in SYSTEMS:
            together, theirs = replicas.of(row, system.key), system.epoch_seconds[row]
            ours = _epoch(together)
            cells.append(_beside(theirs, ours, "{:.0f}".format))
            alone = _epoch(replicas.of("small" if row.startswith("small") else "large", system.key))
            their_alone = system.epoch_seconds["small" if row.startswith("small") else "large"]
            cells.append(_beside(theirs / their_alone, ours and alone and ours / alone, "{:.2f} ×".format))
        rows.append(tuple(cells))
    if settings.device == "cpu":
        rows.append(("on GPUs", NOT_YET))
    threads = replicas.together[0].runs[0].configuration.threads if replicas.together else None
    where = (
        f"each training has {threads} thread(s) of its own on one CPU"
        if threads
        else f"{replicas.devices} GPU(s); trainings beyond that share one, its compute included"
    )
    return Table(
        "Tables 2, 3 and 5: seconds an epoch, trainings at once",
        ("trainings", *(cell for s in SYSTEMS for cell in (f"{s.name}: s/epoch", "over one alone"))),
        tuple(rows),
        "In each cell IBM's figure | ours | ratio. Ours are step seconds × 228, extrapolated: no epoch was run, no "
        f"validation, other sizes and another device; what compares is the second column of each. Here {where}. "
        "A link each is paced for each process; contended is one paced link for all (x86) or two thirds of the rate "
        "each (AC922); a device's own link is there once and is always shared.",
    )


def profile_table(results: Results) -> Table | None:
    """Tables 4 and 6: rates, utilization and overlap by link; None before that stage has run."""
    if results.links is None:
        return None
    rows: list[tuple[str, ...]] = []
    for system in SYSTEMS:
        link = results.links.of(system.key)
        alone = link.of("auto") if link else ()
        beside = results.replicas.of("large_contended", system.key) if results.replicas else None
        for how, theirs, runs in (
            ("a link each", system.alone, alone),
            (system.contended_how, system.contended, beside.runs if beside else ()),
        ):
            figures = [run.figures for run in runs if run.figures is not None]
            in_rate = median_of(figures, lambda f: f.copies_in.busy_bytes_per_second)
            out_rate = median_of(figures, lambda f: f.copies_out.busy_bytes_per_second)
            rows.append(
                (f"{system.name}, {how}",
                 _beside(theirs.utilization, utilization(runs), percent),
                 _beside(theirs.in_bytes_per_second / 1e9, in_rate and in_rate / 1e9, "{:.3g}".format),
                 _beside(theirs.out_bytes_per_second / 1e9, out_rate and out_rate / 1e9, "{:.3g}".format))
            )  # fmt: skip
    if results.settings.device == "cpu":
        rows.append(("on a GPU", NOT_YET))
    return Table(
        "Tables 4 and 6: what the profiler says",
        ("system", "utilization", "to the device, GB/s", "from the device, GB/s"),
        tuple(rows),
        "In each cell IBM's figure | ours | ratio. IBM: nvprof over steps 20 to 50 of the second epoch. Ours: lmswap's "
        f"own record over {results.settings.timed_steps} timed steps, in which the loss counts as idle. GB/s: "
        "bytes over the seconds of copies, on links that were set by ratio, so that theirs and ours differ by design.",
    )


def prediction_table(results: Results) -> Table | None:
    """IBM's measurements, the simulator's predictions for IBM's machines, and measurements here."""
    if results.predictions is None:
        return None
    found = results.predictions
    rows: list[tuple[str, ...]] = []
    for machine in MACHINES:
        system = next((s for s in SYSTEMS if MACHINE_OF_SYSTEM[s.key] == machine), None)
        theirs = found.find(machine, FIRST_TFLMS)
        ours = found.find(machine, OURS)
        link = results.links.of(system.key) if results.links and system else None
        cost = link_overhead(results, system.key) if system else None
        busy = utilization(link.of("auto")) if link else None
        measured = f"{system.overhead:.2f} ×, {percent(system.alone.utilization)}" if system else NOTHING
        rows.append(
            (theirs.machine_name, measured,
             f"{theirs.step_seconds / theirs.free_seconds:.2f} ×, {percent(theirs.utilization)}",
             f"{ours.step_seconds / ours.free_seconds:.3f} ×, {percent(ours.utilization)}",
             f"{ours.bound_seconds / ours.free_seconds:.3f} ×",
             f"{times(cost)}, {percent(busy)}" if cost else NOT_YET)
        )  # fmt: skip
    return Table(
        "The answer without the machine: 192³ in the memory of 144³, overhead and utilization",
        ("machine", "IBM measured", "IBM's method, predicted", "lmswap, predicted", "bound",
         f"lmswap, measured at that ratio ({results.origin.device})"),
        tuple(rows),
        "Predicted by the simulator from rooflines (the V100s at the speed that the case study's epochs give); bound: "
        "no plan for this order of ops is faster. IBM's method: every tensor that is used more than one level later "
        "leaves and returns, and compute waits for each copy, on the network with norms as Keras writes them. "
        "Computing again counts as computing.",
    )  # fmt: skip


def _epoch(together: Together | None) -> float | None:
    return None if together is None else statistics.fmean(together.seconds) * STEPS_PER_EPOCH


def _beside(theirs: float, ours: float | None, form: Callable[[float], str]) -> str:
    """Formats IBM's figure, ours, and the ratio of ours to IBM's."""
    return (
        f"{form(theirs)} | {NOTHING} | {NOTHING}"
        if ours is None
        else f"{form(theirs)} | {form(ours)} | {ours / theirs:.2f}"
    )


def _ratio(ours: float | None, theirs: float) -> str:
    return NOTHING if ours is None else f"{ours / theirs:.2f}"


def _reached(is_reached: bool | None) -> str:
    return NOTHING if is_reached is None else "yes" if is_reached else "no"
