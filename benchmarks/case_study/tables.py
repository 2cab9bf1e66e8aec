"""Which figures stand beside which? The case study's tables, each cell with IBM's figure, ours and their ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.case_study import published
from benchmarks.case_study.links import describe_link
from benchmarks.case_study.predict import FIRST_TFLMS, MACHINE_OF_SYSTEM, MACHINES, OURS
from benchmarks.case_study.published import EPOCH_ROWS, STEPS_PER_EPOCH, SYSTEMS
from benchmarks.case_study.ratios import Spread, overhead
from benchmarks.case_study.results import Ladder, LinkRuns, Links, Results, Together
from benchmarks.unet3d.run import Run
from benchmarks.unet3d.scores import REGIONS, subject_means
from lmswap.profiling.figures import Figures

NOT_YET = "not yet measured"
_NOTHING = "–"
_MOST_STALLS = 8


@dataclass(frozen=True)
class Table:
    """``rows`` have a cell for each of ``headings``, or two: then the second stands for all of them.

    ``note`` says what the figures are and what they are not.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def goals(results: Results) -> Table:
    """What was to be reached: overhead and utilization at the case study's ratios of transfer to compute time."""
    rows: list[tuple[str, ...]] = []
    for system in SYSTEMS:
        link = results.links.of(system.key) if results.links else None
        cost, busy = link_overhead(results, system.key), _utilization(link.of("auto")) if link else None
        at = _ratio_name(link) if link else f"{system.ratio} ({system.name})"
        goal = published.OVERHEAD_GOALS[system.key]
        rows.append(
            (f"overhead at {at}", f"{system.overhead:.2f} ×", f"≤ {goal:.2f} ×", _times(cost),
             _ratio(cost.median if cost else None, system.overhead),
             _reached(cost.median <= goal if cost else None))
        )  # fmt: skip
        goal = published.UTILIZATION_GOAL
        rows.append(
            (f"utilization at {at}", _percent(system.alone.utilization), f"≥ {_percent(goal)}", _percent(busy),
             _ratio(busy, system.alone.utilization), _reached(busy >= goal if busy is not None else None))
        )  # fmt: skip
    if results.settings.device == "cpu":
        rows.append(("on a GPU", NOT_YET))
    return Table(
        f"{results.settings.large}³ in the memory of {results.settings.small}³, beside unlimited memory",
        ("", "IBM", "goal", "ours", "ours / IBM", "reached"),
        tuple(rows),
        "IBM's overhead is its epoch at 192³ over 2.37 times its epoch at 144³. Ours is the median over repeats of the "
        "step over that of the same graphs with unlimited memory, run beside it; in brackets the lowest and the "
        "highest. Utilization: time in which the device computes, over the measured window.",
    )


def box_table(results: Results) -> Table | None:
    """Table 1."""
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


def ladder_table(results: Results) -> Table | None:
    """Every size with unlimited memory and under the budget."""
    ladder, settings = results.ladder, results.settings
    if ladder is None or ladder.budget_bytes is None:
        return None
    rows: list[tuple[str, ...]] = []
    for size in settings.sizes:
        unswapped, swapped = ladder.of(size, "unswapped"), ladder.of(size, "swapped")
        rows.append(
            (f"{size}³", f"{(size / settings.small) ** 3:.2f} ×", _peak(unswapped), _peak(swapped),
             _step(unswapped), _step(swapped), _rate(unswapped, size), _rate(swapped, size), _moved(swapped),
             _predicted(swapped), _times(overhead(swapped, unswapped)))
        )  # fmt: skip
    if settings.device == "cpu":
        rows.append(("on a GPU", NOT_YET))
    return Table(
        f"Every size under the budget of {ladder.budget_bytes / 2**30:.2f} GiB, which {settings.small}³ just fits",
        ("size", "voxels", "peak, free (GiB)", "peak, budget (GiB)", "step, free (s)", "step, budget (s)",
         "voxels/s, free", "voxels/s, budget", "out + in (GiB)", "predicted (s)", "overhead"),
        tuple(rows),
        "free: lmswap's graphs with unlimited memory. Peaks: "
        + ("growth of the process's resident memory" if settings.device == "cpu" else "of torch's allocator")
        + f". Steps: median of {settings.timed_steps} in each of {settings.repeats} processes. Predicted: forward and "
        "backward only, by the plan in force, without loss and optimizer.",
    )  # fmt: skip


def link_table(results: Results) -> Table | None:
    """The links beside each other, and policies over each."""
    links = results.links
    if links is None:
        return None
    rows = [("–", "unlimited memory", *_link_cells(links.unswapped, links))]
    for link in links.links:
        for policy, name in (("auto", "lmswap"), ("tflms", "TFLMS policy, byte budget")):
            if runs := link.of(policy):
                rows.append((_ratio_name(link), name, *_link_cells(runs, links)))
    how = "; ".join(f"{link.name}: {describe_link(link)}" for link in links.links)
    unreached = [link.name for link in links.links if link.link is None]
    return Table(
        f"{results.settings.large}³ under the same budget over several links",
        ("ratio of transfer to compute", "policy", "step (s)", "overhead", "utilization", "out (GiB)", "in (GiB)",
         "achieved out | in (GB/s)", "stalled (s)", "exposed (s)", "hidden"),
        tuple(rows),
        f"{how}. The step saves {links.saved_bytes / 1e9:.2f} GB for its backward pass and computes "
        f"{links.forward_seconds:.2f} s forward. Out, in, stalled, exposed: of one step. Achieved: over the seconds of "
        "copies. Exposed: copying while nothing computes; hidden: the share of copying under compute."
        + "".join(f" The ratio wanted for {name} needs a faster link than this device has." for name in unreached),
    )  # fmt: skip


def _link_cells(runs: Sequence[Run], links: Links) -> tuple[str, ...]:
    figures = [run.figures for run in runs if run.figures is not None]
    rates = (
        _median(figures, lambda f: f.copies_out.busy_bytes_per_second, lambda rate: f"{rate / 1e9:.2f}"),
        _median(figures, lambda f: f.copies_in.busy_bytes_per_second, lambda rate: f"{rate / 1e9:.2f}"),
    )
    return (
        _step(runs),
        _times(overhead(runs, links.unswapped)),
        _percent(_utilization(runs)),
        _median(figures, lambda f: f.copies_out.bytes_per_step / 2**30, "{:.2f}".format),
        _median(figures, lambda f: f.copies_in.bytes_per_step / 2**30, "{:.2f}".format),
        " | ".join(rates),
        _median(figures, lambda f: (f.stall_seconds or 0.0) / f.num_steps, "{:.2f}".format),
        _median(figures, lambda f: f.exposed_seconds / f.num_steps, "{:.2f}".format),
        _median(figures, lambda f: f.overlap, _percent),
    )


def stall_table(results: Results) -> Table | None:
    """Which ops waited for which copies, over each link, where a goal was missed or anything stalled."""
    if results.links is None:
        return None
    rows: list[tuple[str, ...]] = []
    for link in results.links.links:
        runs = [run for run in link.of("auto") if run.figures is not None]
        if not runs:
            continue
        run = runs[-1]
        assert run.figures is not None
        for stall in run.stalls[:_MOST_STALLS]:
            why = "its bytes had not come back" if stall.lane == "in" else "its memory was not free yet"
            rows.append(
                (_ratio_name(link), stall.op, stall.source or _NOTHING, stall.buffer, why,
                 f"{1000 * stall.seconds / run.figures.num_steps:.1f}")
            )  # fmt: skip
    if not rows:
        rows = [(_NOTHING, "no op waited for a copy")]
    return Table(
        "Which ops stall, and why",
        ("ratio", "op", "source", "waits for", "why", "ms a step"),
        tuple(rows),
        f"The {_MOST_STALLS} longest over each link, of the last repeat of policy auto."
        + "".join(_where_time_goes(results.links, link) for link in results.links.links),
    )


def _where_time_goes(links: Links, link: LinkRuns) -> str:
    """What a step over ``link`` takes longer than one with unlimited memory, and for what."""
    runs, free = link.of("auto"), links.unswapped
    stalled, computing, before = (
        _median_of([run.figures for run in some if run.figures is not None], value)
        for some, value in (
            (runs, lambda f: (f.stall_seconds or 0.0) / f.num_steps),
            (runs, lambda f: f.compute_seconds / f.num_steps),
            (free, lambda f: f.compute_seconds / f.num_steps),
        )
    )
    if stalled is None or computing is None or before is None:
        return ""
    longer = statistics.median(_seconds(runs)) - statistics.median(_seconds(free))
    again = max((run.swapping.recomputed_bytes or 0 for run in runs if run.swapping), default=0)
    return (
        f" At {_ratio_name(link)} the step takes {longer:+.2f} s against unlimited memory: {stalled:.2f} s stalled, "
        f"{computing - before:+.2f} s of computing, with {again / 2**30:.2f} GiB computed again and copies beside it."
    )


def epoch_table(results: Results) -> Table | None:
    """Tables 2, 3 and 5."""
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
    where = (
        f"each training has {replicas.threads} thread(s) of its own on one CPU"
        if replicas.threads
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
    """Tables 4 and 6."""
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
            in_rate = _median_of(figures, lambda f: f.copies_in.busy_bytes_per_second)
            out_rate = _median_of(figures, lambda f: f.copies_out.busy_bytes_per_second)
            rows.append(
                (f"{system.name}, {how}",
                 _beside(theirs.utilization, _utilization(runs), _percent),
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
    """The case study without the machine: IBM's measurements, the simulator's, and what was measured here."""
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
        busy = _utilization(link.of("auto")) if link else None
        measured = f"{system.overhead:.2f} ×, {_percent(system.alone.utilization)}" if system else _NOTHING
        rows.append(
            (theirs.machine_name, measured,
             f"{theirs.step_seconds / theirs.free_seconds:.2f} ×, {_percent(theirs.utilization)}",
             f"{ours.step_seconds / ours.free_seconds:.3f} ×, {_percent(ours.utilization)}",
             f"{ours.bound_seconds / ours.free_seconds:.3f} ×",
             f"{_times(cost)}, {_percent(busy)}" if cost else NOT_YET)
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


def failure_table(results: Results) -> Table | None:
    """What did not finish, and why."""
    if not results.failures:
        return None
    rows = tuple((f.configuration.name, f.configuration.policy or "", f.message) for f in results.failures)
    return Table("What did not finish", ("run", "policy", "why"), rows)


def headline(results: Results) -> str:
    """The first sentence of the page."""
    settings = results.settings
    what = f"{settings.large}³ under the {settings.small}³ budget"
    cost = ladder_overhead(results.ladder, settings.large) if results.ladder else None
    if cost is None:
        return f"{what}: {NOT_YET}."
    percent = 100 * (cost.median - 1)
    change = f"costs {percent:.1f} % over" if percent >= 0 else f"takes {-percent:.1f} % less than"
    spread = f"{100 * (cost.low - 1):+.1f} to {100 * (cost.high - 1):+.1f} %"
    repeats = f" (median of {cost.num} repeats, {spread})" if cost.num > 1 else " (one run)"
    return f"{what} {change} unlimited memory{repeats}."


def ladder_overhead(ladder: Ladder, size: int) -> Spread | None:
    """Overhead of a size under the budget."""
    return overhead(ladder.of(size, "swapped"), ladder.of(size, "unswapped"))


def link_overhead(results: Results, name: str, policy: str = "auto") -> Spread | None:
    """Overhead of the large size over a link."""
    link = results.links.of(name) if results.links else None
    return overhead(link.of(policy), results.links.unswapped) if link and results.links else None


def _ratio_name(link: LinkRuns) -> str:
    system = next((system for system in SYSTEMS if system.key == link.name), None)
    if system is None:
        return f"{link.ratio:.2g} ({link.name})"
    return f"{system.ratio} ({system.name})" if link.link else f"{link.ratio:.2g} (for {system.ratio}, {system.name})"


def _utilization(runs: Sequence[Run]) -> float | None:
    return _median_of([run.figures for run in runs if run.figures is not None], lambda figures: figures.utilization)


def _median_of(figures: Sequence[Figures], value: Callable[[Figures], float | None]) -> float | None:
    values = [found for found in map(value, figures) if found is not None]
    return statistics.median(values) if values else None


def _median(figures: Sequence[Figures], value: Callable[[Figures], float | None], form: Callable[[float], str]) -> str:
    found = _median_of(figures, value)
    return _NOTHING if found is None else form(found)


def _epoch(together: Together | None) -> float | None:
    return None if together is None else statistics.fmean(together.seconds) * STEPS_PER_EPOCH


def _beside(theirs: float, ours: float | None, form: Callable[[float], str]) -> str:
    """IBM's figure, ours, and ours over IBM's."""
    return (
        f"{form(theirs)} | {_NOTHING} | {_NOTHING}"
        if ours is None
        else f"{form(theirs)} | {form(ours)} | {ours / theirs:.2f}"
    )


def _times(spread: Spread | None) -> str:
    if spread is None:
        return _NOTHING
    brackets = f" [{spread.low:.3f}, {spread.high:.3f}]" if spread.num > 1 else ""
    return f"{spread.median:.3f} ×{brackets}"


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}".replace("%", " %")


def _ratio(ours: float | None, theirs: float) -> str:
    return _NOTHING if ours is None else f"{ours / theirs:.2f}"


def _reached(is_reached: bool | None) -> str:
    return _NOTHING if is_reached is None else "yes" if is_reached else "no"


def _seconds(runs: Sequence[Run]) -> Iterator[float]:
    return (run.seconds_per_step for run in runs)


def _step(runs: Sequence[Run]) -> str:
    return f"{statistics.median(_seconds(runs)):.2f}" if runs else _NOTHING


def _rate(runs: Sequence[Run], size: int) -> str:
    return f"{size**3 / statistics.median(_seconds(runs)):,.0f}".replace(",", " ") if runs else _NOTHING


def _peak(runs: Sequence[Run]) -> str:
    return f"{max(run.peak_bytes for run in runs) / 2**30:.2f}" if runs else _NOTHING


def _moved(runs: Sequence[Run]) -> str:
    swapping = runs[-1].swapping if runs else None
    if swapping is None or swapping.out_bytes is None or swapping.in_bytes is None:
        return _NOTHING
    return f"{swapping.out_bytes / 2**30:.2f} + {swapping.in_bytes / 2**30:.2f}"


def _predicted(runs: Sequence[Run]) -> str:
    swapping = runs[-1].swapping if runs else None
    return _NOTHING if swapping is None or swapping.predicted_seconds is None else f"{swapping.predicted_seconds:.2f}"


def dice_table(results: Results) -> Table | None:
    """Means of what the box plots show."""
    if results.evaluation is None:
        return None
    scores = results.evaluation.scores
    rows: list[tuple[str, ...]] = []
    for size in sorted({score.size for score in scores}):
        means = [list(subject_means(scores, size, region).values()) for region in REGIONS]
        cells = (f"{statistics.fmean(values):.3f}" if values else _NOTHING for values in means)
        subjects = {score.subject for score in scores if score.size == size}
        rows.append((f"{size}³", str(len(subjects)), *cells))
    return Table(
        f"Mean Dice, scored at {max(score.scored_size for score in scores)}³",
        ("size", "subjects", *(region.replace("_", " ") for region in REGIONS)),
        tuple(rows),
        f"{results.evaluation.data}.",
    )
