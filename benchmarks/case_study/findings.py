"""Findings of the runs: the first sentence of the page, and the tables that the case study does not have."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.case_study.cells import NOT_YET, NOTHING, Table, median_of, percent, ratio_name, times, utilization
from benchmarks.case_study.links import TOO_FAST, describe_link, left_out
from benchmarks.case_study.ratios import Spread, overhead
from benchmarks.case_study.results import Ladder, LinkRuns, Links, Results
from benchmarks.unet3d.measured import Run
from benchmarks.unet3d.scores import REGIONS, subject_means
from lmswap.profiling.figures import Figures

_MAX_STALLS = 8
# Shorter stalls cost nothing: compute waits on every copy, and that alone takes some microseconds.
_SHARE_OF_STEP = 0.001


def headline(results: Results) -> str:
    """The first sentence of the page."""
    settings = results.settings
    what = f"{settings.large}³ under the {settings.small}³ budget"
    cost = ladder_overhead(results.ladder, settings.large) if results.ladder else None
    if cost is None:
        return f"{what}: {NOT_YET}."
    more = cost.median - 1
    change = f"costs {percent(more)} over" if more >= 0 else f"takes {percent(-more)} less than"
    spread = f"{100 * (cost.low - 1):+.1f} to {100 * (cost.high - 1):+.1f} %"
    repeats = f" (median of {cost.num} repeats, {spread})" if cost.num > 1 else " (one run)"
    is_idle = not any(
        run.swapping and (run.swapping.out_bytes or run.swapping.recomputed_bytes)
        for run in (results.ladder.of(settings.large, "swapped") if results.ladder else ())
    )
    nothing = " Nothing had to leave: the budget holds that size as it is, so this is noise." if is_idle else ""
    return f"{what} {change} unlimited memory{repeats}.{nothing}"


def ladder_overhead(ladder: Ladder, size: int) -> Spread | None:
    """Step time of a size under the budget relative to unlimited memory; None where it was not run."""
    return overhead(ladder.of(size, "swapped"), ladder.of(size, "unswapped"))


def ladder_table(results: Results) -> Table | None:
    """Step time and throughput of every size, free and under the budget; None before that stage has run."""
    ladder, settings = results.ladder, results.settings
    if ladder is None or ladder.budget_bytes is None:
        return None
    rows: list[tuple[str, ...]] = []
    for size in settings.sizes:
        free, swapped = ladder.of(size, "unswapped"), ladder.of(size, "swapped")
        factor = f"{(size / settings.small) ** 3:.2f} ×"
        rows.append(
            (f"{size}³", factor, _step(free), _step(swapped), _rate(free, size), _rate(swapped, size),
             times(overhead(swapped, free)))
        )  # fmt: skip
    if settings.device == "cpu":
        rows.append(("on a GPU", NOT_YET))
    fits = f", which {settings.small}³ just fits" if settings.budget_bytes is None else ""
    return Table(
        f"Every size under the budget of {ladder.budget_bytes / 2**30:.2f} GiB{fits}",
        ("size", "voxels", "step, free (s)", "step, budget (s)", "voxels/s, free", "voxels/s, budget", "overhead"),
        tuple(rows),
        "free: lmswap's graphs with unlimited memory. Steps: median of "
        f"{settings.timed_steps} in each of {settings.repeats} processes.",
    )


def promise_table(results: Results) -> Table | None:
    """Predicted and measured peaks, bytes and seconds of the swapped steps; None before that stage has run."""
    ladder = results.ladder
    if ladder is None or ladder.budget_bytes is None:
        return None
    rows: list[tuple[str, ...]] = []
    for size in results.settings.sizes:
        free, swapped = ladder.of(size, "unswapped"), ladder.of(size, "swapped")
        last = swapped[-1].swapping if swapped else None
        if last is not None:
            rows.append(
                (f"{size}³", _peak(free), _gib(last.predicted_peak_bytes), _peak(swapped), _gib(last.out_bytes),
                 _gib(last.in_bytes), _gib(last.recomputed_bytes), _two_digits(last.predicted_seconds),
                 _two_digits(last.graph_seconds))
            )  # fmt: skip
    what = "growth of the process's resident memory" if results.settings.device == "cpu" else "of torch's allocator"
    return Table(
        "Predicted before the step, and measured",
        ("size", "peak, free (GiB)", "peak, predicted", "peak, measured", "out (GiB)", "in (GiB)",
         "recomputed (GiB)", "predicted (s)", "measured (s)"),
        tuple(rows),
        f"Peaks: {what}, the highest of all repeats; bytes and seconds: of the last step. Seconds: forward and "
        "backward only, without loss and optimizer, by the plan in force.",
    )  # fmt: skip


def _gib(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / 2**30:.2f}"


def _two_digits(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.2f}"


def link_table(results: Results) -> Table | None:
    """A row for each link and policy; None before that stage has run."""
    links = results.links
    if links is None:
        return None
    rows = [("–", "unlimited memory", *_link_cells(links.unswapped, links))]
    for link in links.links:
        for policy, name in (("auto", "lmswap"), ("tflms", "TFLMS policy, byte budget")):
            if runs := link.of(policy):
                rows.append((ratio_name(link), name, *_link_cells(runs, links)))
    how = "; ".join(f"{link.name}: {describe_link(link)}" for link in links.links)
    unreached = [link.name for link in links.links if link.link is None]
    too_fast = left_out(results.settings.device, links.links)
    return Table(
        f"{results.settings.large}³ under the same budget over several links",
        ("ratio of transfer to compute", "policy", "step (s)", "overhead", "utilization", "out (GiB)", "in (GiB)",
         "achieved out | in (GB/s)", "stalled (s)", "exposed (s)", "hidden"),
        tuple(rows),
        f"{how}. The step saves {links.saved_bytes / 1e9:.2f} GB for its backward pass and computes "
        f"{links.forward_seconds:.2f} s forward. Out, in, stalled, exposed: of one step. Achieved: over the seconds of "
        "copies. Exposed: copying while nothing computes; hidden: the share of copying under compute."
        + "".join(f" The ratio wanted for {name} needs a faster link than this device has." for name in unreached)
        + (f" Left out, {TOO_FAST}: {', '.join(too_fast)}." if too_fast else ""),
    )  # fmt: skip


def _link_cells(runs: Sequence[Run], links: Links) -> tuple[str, ...]:
    figures = [run.figures for run in runs if run.figures is not None]
    rates = (
        _median(figures, lambda f: f.copies_out.busy_bytes_per_second, lambda rate: f"{rate / 1e9:.2f}"),
        _median(figures, lambda f: f.copies_in.busy_bytes_per_second, lambda rate: f"{rate / 1e9:.2f}"),
    )
    return (
        _step(runs),
        times(overhead(runs, links.unswapped)),
        percent(utilization(runs)),
        _median(figures, lambda f: f.copies_out.bytes_per_step / 2**30, "{:.2f}".format),
        _median(figures, lambda f: f.copies_in.bytes_per_step / 2**30, "{:.2f}".format),
        " | ".join(rates),
        _median(figures, lambda f: (f.stall_seconds or 0.0) / f.num_steps, "{:.2f}".format),
        _median(figures, lambda f: f.exposed_seconds / f.num_steps, "{:.2f}".format),
        _median(figures, lambda f: f.overlap, percent),
    )


def stall_table(results: Results) -> Table | None:
    """The longest stalls over each link: op, buffer, cause and ms per step; None before that stage has run."""
    if results.links is None:
        return None
    rows: list[tuple[str, ...]] = []
    for link in results.links.links:
        runs = [run for run in link.of("auto") if run.figures is not None]
        if not runs:
            continue
        run = runs[-1]
        assert run.figures is not None
        for stall in run.stalls[:_MAX_STALLS]:
            if stall.seconds < _SHARE_OF_STEP * run.figures.window_seconds:
                continue
            why = "its bytes were not swapped in" if stall.lane == "in" else "its memory was not free yet"
            rows.append(
                (ratio_name(link), stall.op, stall.source or NOTHING, stall.buffer, why,
                 f"{1000 * stall.seconds / run.figures.num_steps:.1f}")
            )  # fmt: skip
    if not rows:
        rows = [(NOTHING, "no op waited that long for a copy")]
    return Table(
        "Which ops stall, and why",
        ("ratio", "op", "source", "waits for", "why", "ms a step"),
        tuple(rows),
        f"The {_MAX_STALLS} longest over each link in the last repeat, of {percent(_SHARE_OF_STEP)} of the step and "
        "more." + "".join(_where_time_goes(results.links, link) for link in results.links.links),
    )


def _where_time_goes(links: Links, link: LinkRuns) -> str:
    """A sentence on the additional seconds of a step over ``link``, by cause."""
    runs, free = link.of("auto"), links.unswapped
    stalled, computing, before = (
        median_of([run.figures for run in some if run.figures is not None], value)
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
        f" At {ratio_name(link)} the step takes {longer:+.2f} s against unlimited memory: {stalled:.2f} s stalled, "
        f"{computing - before:+.2f} s of computing, with {again / 2**30:.2f} GiB recomputed and copies in parallel."
        + _best_possible(runs[-1])
    )


def _best_possible(run: Run) -> str:
    """A sentence on the predicted seconds of the plan of ``run`` and their lower bound."""
    swapping = run.swapping
    if swapping is None or not swapping.predicted_seconds or not swapping.bound_seconds or not swapping.free_seconds:
        return ""
    planned, bound = swapping.predicted_seconds / swapping.free_seconds, swapping.bound_seconds / swapping.free_seconds
    return (
        f" By the costs of its ops the plan takes {planned:.3f} × the step with unlimited memory, and none under this "
        f"budget less than {bound:.3f} ×."
    )


def dice_table(results: Results) -> Table | None:
    """Mean Dice by region and size, as in the box plots; None before an evaluation."""
    if results.evaluation is None:
        return None
    scores = results.evaluation.scores
    rows: list[tuple[str, ...]] = []
    for size in sorted({score.size for score in scores}):
        means = [list(subject_means(scores, size, region).values()) for region in REGIONS]
        cells = (f"{statistics.fmean(values):.3f}" if values else NOTHING for values in means)
        subjects = {score.subject for score in scores if score.size == size}
        rows.append((f"{size}³", str(len(subjects)), *cells))
    return Table(
        f"Mean Dice, scored at {max(score.scored_size for score in scores)}³",
        ("size", "subjects", *(region.replace("_", " ") for region in REGIONS)),
        tuple(rows),
        f"{results.evaluation.data}.",
    )


def failure_table(results: Results) -> Table | None:
    """The runs that did not finish, with their errors; None if all did."""
    if not results.failures:
        return None
    rows = tuple((f.configuration.name, f.configuration.policy or "", f.message) for f in results.failures)
    return Table("What did not finish", ("run", "policy", "why"), rows)


def _median(figures: Sequence[Figures], value: Callable[[Figures], float | None], form: Callable[[float], str]) -> str:
    found = median_of(figures, value)
    return NOTHING if found is None else form(found)


def _seconds(runs: Sequence[Run]) -> Iterator[float]:
    return (run.seconds_per_step for run in runs)


def _step(runs: Sequence[Run]) -> str:
    return f"{statistics.median(_seconds(runs)):.2f}" if runs else NOTHING


def _rate(runs: Sequence[Run], size: int) -> str:
    return f"{size**3 / statistics.median(_seconds(runs)):,.0f}".replace(",", " ") if runs else NOTHING


def _peak(runs: Sequence[Run]) -> str:
    return f"{max(run.peak_bytes for run in runs) / 2**30:.2f}" if runs else NOTHING
