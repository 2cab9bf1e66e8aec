r"""Figures of device and link from the spans of some steps: utilization, throughput, overlap, idle time and gaps.

With W the window, from the start of the first step to the end of the last; K the union of kernels; H and D the unions
of copies in and out, each within W::

    utilization    |K| / |W|                     what nvvp calls compute utilization: copies do not count
    exposed        |(H ∪ D) \ K|                 copying while nothing computes
    overlap        |(H ∪ D) ∩ K| / |H ∪ D|       the hidden share of copying
    collectives    |N|, hidden |N ∩ K| / |N|     communication between ranks: N is the union of NCCL's kernels
    idle           |W \ (K ∪ N ∪ copies)|        no compute, communication or copies
    gap            idle time between the last activity of one step and the first of the next

H and D consist of copies of 1 MiB and more; smaller ones (scalars, indices) have a row of their own and count as
activity only. Kernels that only pass time, to emulate a link, are excluded by name. Fills, copies within a device and
between devices are neither kernels nor swaps, as in nvvp: time in which nothing else ran counts as idle.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lmswap.errors import TraceError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.profiling.intervals import Intervals, clip, intersect, length, subtract, union

# In a step of the 3D U-Net, copies from this size on are over 99.9 % of the bytes.
SMALL_BYTES = 2**20
# torch.cuda._sleep, and the kernels that pace an emulated link.
_PACING = re.compile(r"spin_kernel|lmswap_pac")


@dataclass(frozen=True)
class CopyFigures:
    """Copies in one direction that began within the window; rates are None where nothing was copied.

    ``bytes_per_second`` is Σ bytes / Σ duration, nvvp's throughput: the link's rate while it copies. Over the time in
    which at least one copy ran it is ``busy_bytes_per_second``, over the whole window ``window_bytes_per_second``.
    """

    num_copies: int
    nbytes: int
    bytes_per_step: float
    copy_seconds: float
    busy_seconds: float
    bytes_per_second: float | None
    busy_bytes_per_second: float | None
    window_bytes_per_second: float | None
    num_small: int
    small_bytes: int
    small_seconds: float


@dataclass(frozen=True)
class Figures:
    """One device over the window. ``step_seconds`` is the median step; ``gap_seconds`` are the gaps, in order of steps.

    ``stall_seconds``: compute's waits for copies in the engine's record; 0 in other tools' timelines. With pageable
    copies the figures are no measurement of swapping: see `invalid`.
    """

    num_steps: int
    window_seconds: float
    step_seconds: float
    compute_seconds: float
    utilization: float
    copies_in: CopyFigures
    copies_out: CopyFigures
    exposed_seconds: float
    overlap: float | None
    collective_seconds: float
    collective_overlap: float | None
    idle_seconds: float
    gap_seconds: tuple[float, ...]
    stall_seconds: float
    num_pageable: int
    pageable_bytes: int

    @property
    def invalid(self) -> str:
        """The reason why these figures are no measurement of swapping, or ""."""
        if not self.num_pageable:
            return ""
        return (
            f"{self.num_pageable} of the copies, {format_bytes(self.pageable_bytes)}, went through pageable host "
            "memory, which the driver stages far below the link's rate. Batches: give the DataLoader pin_memory=True; "
            "swapped tensors: lmswap pins its memory, so something else swaps here"
        )


def figures_of(timeline: Timeline) -> Figures:
    """Return the figures of ``timeline`` over its steps; without steps, it is one step from 0 to its end.

    Raises:
        TraceError: the window has no duration.
    """
    steps = timeline.steps or (Step(0, 0.0, timeline.seconds),)
    start, end = steps[0].start_seconds, steps[-1].end_seconds
    if not end > start:
        raise TraceError(f"the {timeline.source} timeline has no duration, so there is nothing to relate times to")
    window_seconds = end - start
    inside = [span for span in timeline.spans if span.start_seconds < end and span.end_seconds > start]
    copies = [span for span in inside if span.lane in (Lane.IN, Lane.OUT)]
    kernels = _covered(inside, lambda s: s.lane is Lane.COMPUTE and not _PACING.search(s.name), start, end)
    copying = _covered(copies, lambda s: s.nbytes >= SMALL_BYTES, start, end)
    collectives = _covered(inside, lambda s: s.lane is Lane.NETWORK, start, end)
    active = union(np.concatenate([kernels, collectives, _covered(copies, lambda _: True, start, end)]))
    stalls = [span.seconds for span in inside if span.lane is Lane.STALL]
    pageable = [s.nbytes for s in copies if s.is_pageable and s.nbytes >= SMALL_BYTES]
    return Figures(
        num_steps=len(steps),
        window_seconds=window_seconds,
        step_seconds=statistics.median(step.end_seconds - step.start_seconds for step in steps),
        compute_seconds=length(kernels),
        utilization=length(kernels) / window_seconds,
        copies_in=_copy_figures(copies, Lane.IN, steps),
        copies_out=_copy_figures(copies, Lane.OUT, steps),
        exposed_seconds=length(subtract(copying, kernels)),
        overlap=_overlapped_share(copying, kernels),
        collective_seconds=length(collectives),
        collective_overlap=_overlapped_share(collectives, kernels),
        idle_seconds=window_seconds - length(active),
        gap_seconds=tuple(_gap(active, later.start_seconds) for _, later in pairwise(steps)),
        stall_seconds=sum(stalls, 0.0),
        num_pageable=len(pageable),
        pageable_bytes=sum(pageable),
    )


def _overlapped_share(activity: Intervals, kernels: Intervals) -> float | None:
    return length(intersect(activity, kernels)) / length(activity) if len(activity) else None


def _covered(spans: list[Span], keep: Callable[[Span], object], start: float, end: float) -> Intervals:
    return clip(union([(span.start_seconds, span.end_seconds) for span in spans if keep(span)]), start, end)


def _copy_figures(copies: list[Span], lane: Lane, steps: tuple[Step, ...]) -> CopyFigures:
    start, end = steps[0].start_seconds, steps[-1].end_seconds
    begun = [span for span in copies if span.lane is lane and span.start_seconds >= start]
    large = [span for span in begun if span.nbytes >= SMALL_BYTES]
    small = [span for span in begun if span.nbytes < SMALL_BYTES]
    nbytes, copy_seconds = sum(span.nbytes for span in large), sum(span.seconds for span in large)
    busy_seconds = length(_covered(large, lambda _: True, start, end))
    return CopyFigures(
        num_copies=len(large),
        nbytes=nbytes,
        bytes_per_step=nbytes / len(steps),
        copy_seconds=copy_seconds,
        busy_seconds=busy_seconds,
        bytes_per_second=nbytes / copy_seconds if copy_seconds else None,
        busy_bytes_per_second=nbytes / busy_seconds if busy_seconds else None,
        window_bytes_per_second=nbytes / (end - start) if large else None,
        num_small=len(small),
        small_bytes=sum(span.nbytes for span in small),
        small_seconds=sum(span.seconds for span in small),
    )


def _gap(active: Intervals, boundary: float) -> float:
    """Return the time from the last activity before ``boundary`` to the first after it; 0 where either is missing."""
    later = int(np.searchsorted(active[:, 0], boundary, side="left"))
    if later in (0, len(active)):
        return 0.0
    return max(0.0, float(active[later, 0] - active[later - 1, 1]))
