"""Table of a recipe's points next to the published ones; its rows state what they are based on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.case_study.cells import NOTHING, Table, percent
from benchmarks.case_study.published import EPOCH_SECONDS_TOGETHER, STEPS_PER_EPOCH
from benchmarks.distributed import published
from benchmarks.distributed.results import Efficiency, Origin, Recipe, Reduction, Results, Training
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import format_seconds

PUBLISHED = "published"


def make_table(results: Results) -> Table:
    """Published rows first, then those that were measured or predicted."""
    return _TABLES[results.recipe](results)


def write_page(results: Results) -> str:
    """The table with its note, and on what it was measured, as Markdown that is also legible on a terminal."""
    table = make_table(results)
    return f"# {table.title}\n\n{table.note} {describe(results.origin)}\n\n{write_table(table)}"


def write_table(table: Table) -> str:
    """The headings and rows of ``table`` in Markdown."""
    rows = [(*row, *[""] * (len(table.headings) - len(row))) for row in (table.headings, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def describe(origin: Origin | None) -> str:
    """Device, backend, software and commit in a sentence."""
    if origin is None:
        return "Nothing of this was measured here."
    machine = origin.machine
    disturbed = " Others used these cores meanwhile: the seconds say little." if origin.is_disturbed else ""
    return (
        f"Measured on {origin.device}, {machine.cores} cores for all ranks; {origin.backend}, torch {machine.torch}, "
        f"commit {machine.commit}, {origin.created}; load average {origin.load_average:.1f}.{disturbed}"
    )


def _resnet50_table(results: Results) -> Table:
    rows = [
        (f"ImageNet, {row.system}", str(row.gpus), str(row.batch), NOTHING, f"{row.images_per_second:,.0f}",
         percent(row.efficiency), NOTHING, percent(row.accuracy), NOTHING, PUBLISHED)
        for row in published.IMAGENET
    ]  # fmt: skip
    for point in results.trainings:
        alone = _find(results.trainings, point, ranks=1)
        efficiency = point.images_per_second / point.ranks / alone.images_per_second if alone else None
        rows.append(
            (point.name, str(point.ranks), str(point.batch), _budget(point), f"{point.images_per_second:,.1f}",
             percent(efficiency), _bytes(point.peak_bytes), percent(point.accuracy), _same(results, point), point.basis)
        )  # fmt: skip
    return Table(
        "ResNet-50 on many ranks",
        ("training", "ranks", "batch of a rank", "budget", "images/s", "efficiency", "peak of a rank", "top-1",
         "bits of plain torch", "basis"),
        tuple(rows),
        "Efficiency is images per second of a rank over those of one rank alone (published: of one machine). The "
        "published trainings are 90 epochs of ImageNet at 224 x 224.",
    )  # fmt: skip


def _unet3d_table(results: Results) -> Table:
    rows = [
        ("192³, TFLMS, V100s", str(gpus), "16 GB card", format_seconds(seconds / math.ceil(STEPS_PER_EPOCH / gpus)),
         f"{seconds:.0f}", f"{EPOCH_SECONDS_TOGETHER[1] / seconds:.2f}",
         percent(EPOCH_SECONDS_TOGETHER[1] / seconds / gpus), NOTHING, NOTHING, PUBLISHED)
        for gpus, seconds in EPOCH_SECONDS_TOGETHER.items()
    ]  # fmt: skip
    for point in results.trainings:
        alone = _find(results.trainings, point, ranks=1)
        speed_up = _epoch_seconds(alone) / _epoch_seconds(point) if alone else None
        rows.append(
            (point.name, str(point.ranks), _budget(point), format_seconds(point.step_seconds),
             f"{_epoch_seconds(point):.0f}", NOTHING if speed_up is None else f"{speed_up:.2f}",
             percent(speed_up and speed_up / point.ranks), _bytes(point.peak_bytes), _same(results, point), point.basis)
        )  # fmt: skip
    return Table(
        "Table 7: the 3D U-Net on many ranks",
        ("training", "ranks", "budget of a rank", "step", "epoch, s", "speed-up", "efficiency", "peak of a rank",
         "bits of plain torch", "basis"),
        tuple(rows),
        f"Epochs are of {STEPS_PER_EPOCH} subjects, in whole steps: at 16 ranks the last is not full, which "
        "costs 5 %. Ours are step seconds times the steps of one, extrapolated; published steps are epochs divided by "
        "them.",
    )  # fmt: skip


def _allreduce_table(results: Results) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            "P40s",
            f"{network}'s gradients",
            NOTHING,
            "fused",
            NOTHING,
            NOTHING,
            f"up to {speed_up} ×",
            NOTHING,
            PUBLISHED,
        )
        for network, speed_up in published.FUSION_SPEED_UP.items()
    ]
    for point in results.reductions:
        flat = next(p for p in results.reductions if _sums(p) == _sums(point))
        rows.append(
            (f"{point.ranks} in nodes of {point.per_node}", format_bytes(point.nbytes), str(point.tensors), point.way,
             format_seconds(point.seconds), f"{point.nbytes / point.seconds / 1e9:.3f}",
             f"{flat.seconds / point.seconds:.2f} ×", _difference(point), point.basis)
        )  # fmt: skip
    return Table(
        "Sums over ranks",
        ("ranks", "bytes", "tensors", "way", "seconds", "GB/s", "speed-up", "difference", "basis"),
        tuple(rows),
        "Speed-up is over the first way of the same bytes, the backend's own all-reduce of each tensor. Difference is "
        "the largest from its sums, over the largest number in them. On one machine there is no slow link between "
        "nodes: what hierarchies save is not to be seen there. Published is also that 1,024 P40s scaled with "
        f"{percent(published.FLAT_EFFICIENCY)} efficiency without fused tensors and hierarchical all-reduce, with "
        f"{percent(published.HIERARCHICAL_EFFICIENCY)} with them.",
    )


def _efficiency_table(results: Results) -> Table:
    points = results.efficiencies
    rows: list[tuple[str, ...]] = []
    for point in points:
        seconds, predicted, network = point.seconds, point.predicted, point.network
        kept = f"{100 * network.busy_factor:.0f} / {100 * network.compute_factor:.0f} %" if network else NOTHING
        rows.append(
            (_trained(point), _ranks(point), format_seconds(point.seconds_alone), format_seconds(seconds),
             format_seconds(point.predicted_seconds), _signed(point.predicted_seconds / seconds - 1),
             format_seconds(predicted.all_reduce_seconds), kept, format_seconds(predicted.unhidden_seconds),
             _signed(point.excess), _efficiency(points, point, seconds), "measured")
        )  # fmt: skip
    machines = _machines(points)
    for point in machines:
        for more in point.larger:
            seconds = point.seconds_alone + more.extra_seconds
            rows.append(
                (_trained(point), str(more.ranks), NOTHING, NOTHING, format_seconds(seconds), NOTHING,
                 format_seconds(more.all_reduce_seconds), NOTHING, format_seconds(more.unhidden_seconds), NOTHING,
                 _efficiency(points, point, seconds), "predicted")
            )  # fmt: skip
    each = " or ".join(dict.fromkeys(str(point.ranks) for point in machines)) or "so many"
    return Table(
        "What ranks cost each other",
        ("training", "ranks", "without all-reduce", "with all-reduce", "predicted", "off by", "all-reduce",
         "kept beside", "not hidden", "above both", "efficiency", "basis"),
        tuple(rows),
        "Without all-reduce, as many processes each train for themselves; with it, by DistributedDataParallel, in "
        "turns. Predicted is what the simulator says, from the step without, the plan, and all-reduces timed alone and "
        "beside compute: kept beside is what both then keep of their speed. Not hidden is what no plan could hide of "
        "the all-reduces, by the simulator's bound; above both is what the step takes beyond that and the step "
        "without. Efficiency is the step of one rank over that of so many. Predicted rows are of machines with "
        f"{each} ranks, a core for each, that reach each other as fast as these processes do. {_held(points)}",
    )  # fmt: skip


def _held(points: Sequence[Efficiency]) -> str:
    """A sentence on the deviation of measured steps of several ranks from their predictions and lower bounds."""
    several = [point for point in points if point.ranks > 1]
    if not several:
        return "There are no all-reduces to predict."
    off = max(abs(point.predicted_seconds / point.seconds - 1) for point in several)
    return (
        f"Of several ranks a prediction is off by at most {percent(off)}, and a step at most "
        f"{percent(max(0.0, *(point.excess for point in several)))} above both."
    )


def _trained(point: Efficiency) -> str:
    return f"{point.name}, in {format_bytes(point.budget_bytes)}"


def _ranks(point: Efficiency) -> str:
    return str(point.ranks) if point.has_cores else f"{point.ranks}, sharing cores"


def _efficiency(points: Sequence[Efficiency], like: Efficiency, seconds: float) -> str:
    alone = next((p for p in points if p.ranks == 1 and _trained(p) == _trained(like)), None)
    return percent(alone and alone.seconds / seconds)


def _machines(points: Sequence[Efficiency]) -> list[Efficiency]:
    """By training: the point with the most ranks that have a core each, which represents separate machines."""
    return [*{_trained(point): point for point in points if point.larger and point.has_cores}.values()]


def _scale_table(results: Results) -> Table:
    rows: list[tuple[str, ...]] = []
    for system, seconds in published.KERAS_SECONDS.items():
        for gpus, took in zip(published.KERAS_GPUS, seconds, strict=True):
            rows.append(
                (system, str(gpus), NOTHING, NOTHING, f"{took} s in all", f"{seconds[0] / took:.2f} ×", NOTHING,
                 NOTHING, PUBLISHED)
            )  # fmt: skip
    for point in results.trainings:
        first = results.trainings[0]
        rows.append(
            (f"{'out' if point.ranks > 1 else 'up' if point is not first else 'from'}: {point.name}", str(point.ranks),
             str(point.batch), _budget(point), format_seconds(point.step_seconds),
             f"{point.images_per_second / first.images_per_second:.2f} ×", _bytes(point.peak_bytes),
             percent(point.accuracy), point.basis)
        )  # fmt: skip
    return Table(
        "A larger batch on one device, or more devices",
        ("training", "ranks", "batch of a rank", "budget", "step", "throughput", "peak of a rank", "top-1", "basis"),
        tuple(rows),
        "Throughput is over the first of the same system. Scaled up, one rank takes the batch of all of them under a "
        "budget near the memory that a rank's batch takes plainly; scaled out, each rank has its own memory.",
    )


_TABLES: dict[Recipe, Callable[[Results], Table]] = {
    "resnet50": _resnet50_table,
    "allreduce": _allreduce_table,
    "unet3d": _unet3d_table,
    "scale": _scale_table,
    "efficiency": _efficiency_table,
}


def _epoch_seconds(point: Training) -> float:
    return math.ceil(STEPS_PER_EPOCH / point.ranks) * point.step_seconds


def _find(points: Sequence[Training], like: Training, *, ranks: int) -> Training | None:
    """The point of the same training and method as ``like`` on ``ranks``; None if there is none."""

    def way(point: Training) -> tuple[object, ...]:
        return point.name, point.batch, point.budget_bytes is None, point.basis

    return next((point for point in points if point.ranks == ranks and way(point) == way(like)), None)


def _same(results: Results, point: Training) -> str:
    """Table cell: whether weights are bitwise identical to those of the same ranks without lmswap."""
    if point.budget_bytes is None or point.bits is None:
        return NOTHING
    plain = [p for p in results.trainings if p.budget_bytes is None and p.bits and p.ranks == point.ranks]
    return NOTHING if not plain else "yes" if plain[0].bits == point.bits else "no"


def _sums(point: Reduction) -> tuple[object, ...]:
    return point.ranks, point.per_node, point.nbytes, point.tensors, point.basis


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _difference(point: Reduction) -> str:
    return "none" if point.difference == 0 else f"{point.difference:.1e}"


def _budget(point: Training) -> str:
    return NOTHING if point.budget_bytes is None else format_bytes(point.budget_bytes)


def _bytes(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else format_bytes(nbytes)
