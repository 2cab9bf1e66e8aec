"""The figures of timelines small enough to count by hand; one row of the drawings is a second, # is busy."""

import pytest

from lmswap.errors import TraceError
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.profiling.figures import figures_of

MIB = 2**20


def kernel(start, end, name="conv"):
    return Span(Lane.COMPUTE, name, start, end)


def copy(lane, start, end, nbytes=4 * MIB, **more):
    return Span(lane, "copy", start, end, nbytes, **more)


def timeline(*spans, steps=((0, 0.0, 10.0),)):
    return Timeline("test", spans, (), tuple(Step(*step) for step in steps))


#          0 1 2 3 4 5 6 7 8 9
# kernels  # # # . . # # . . .
# in       . . # # . . . . . .
# out      . . . # # # . . . .
HAND = timeline(kernel(0, 3), kernel(5, 7), copy(Lane.IN, 2, 4), copy(Lane.OUT, 3, 6, 6 * MIB))


def test_shares_of_the_window_are_those_counted_by_hand():
    figures = figures_of(HAND)
    assert figures.window_seconds == 10
    assert figures.compute_seconds == 5
    assert figures.utilization == 0.5
    assert figures.exposed_seconds == 2  # seconds 3 and 4
    assert figures.overlap == 0.5  # of seconds 2 to 5, 2 and 5 are hidden
    assert figures.idle_seconds == 3
    assert figures.invalid == ""


def test_throughput_is_over_copies_busy_time_and_the_window():
    #    two copies in at once: 1–3 and 2–5
    figures = figures_of(timeline(copy(Lane.IN, 1, 3, 4 * MIB), copy(Lane.IN, 2, 5, 6 * MIB))).copies_in
    assert (figures.num_copies, figures.nbytes) == (2, 10 * MIB)
    assert figures.bytes_per_second == 10 * MIB / 5
    assert figures.busy_bytes_per_second == 10 * MIB / 4
    assert figures.window_bytes_per_second == 10 * MIB / 10


def test_a_direction_without_copies_has_no_rate():
    figures = figures_of(timeline(kernel(0, 3)))
    assert figures.copies_out.bytes_per_second is figures.overlap is None
    assert figures.exposed_seconds == 0


def test_kernels_of_several_streams_count_once():
    assert figures_of(timeline(kernel(0, 4), kernel(1, 3), kernel(3, 5))).utilization == 0.5


def test_kernels_that_only_pass_the_time_are_no_compute():
    spans = (kernel(0, 4, "at::cuda::spin_kernel(long)"), kernel(5, 6), kernel(7, 8, "lmswap_pace_copy"))
    assert figures_of(timeline(*spans)).utilization == 0.1


def test_communication_is_neither_compute_nor_idle_time():
    spans = (kernel(0, 4), Span(Lane.NETWORK, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 7))
    figures = figures_of(timeline(*spans))
    assert figures.utilization == 0.4
    assert figures.collective_seconds == 4
    assert figures.collective_overlap == 0.25
    assert figures.idle_seconds == 3
    assert figures_of(timeline(kernel(0, 4))).collective_overlap is None


def test_small_copies_have_a_row_of_their_own_and_are_not_idle():
    figures = figures_of(timeline(copy(Lane.IN, 0, 1, MIB - 1), copy(Lane.IN, 1, 2, MIB)))
    assert (figures.copies_in.num_copies, figures.copies_in.nbytes) == (1, MIB)
    assert (figures.copies_in.num_small, figures.copies_in.small_bytes) == (1, MIB - 1)
    assert figures.exposed_seconds == 1
    assert figures.idle_seconds == 8


def test_only_the_window_counts_and_a_copy_belongs_to_its_start():
    spans = (kernel(-2, 3), copy(Lane.OUT, -1, 1), copy(Lane.OUT, 9, 12), kernel(11, 12))
    figures = figures_of(timeline(*spans))
    assert figures.compute_seconds == 3
    assert figures.copies_out.num_copies == 1
    assert figures.copies_out.busy_seconds == 1
    assert figures.copies_out.bytes_per_second == 4 * MIB / 3


def test_bytes_and_times_are_per_step_and_gaps_are_between_activities():
    #          0 1 2 3 4 5 6 7 8 9
    # step     0 0 0 0 1 1 1 2 2 2
    # kernels  # # # . . # # # # .       the gap of the first boundary is 3–5; a kernel spans the second
    spans = (kernel(0, 3), kernel(5, 6), kernel(6, 9), copy(Lane.IN, 0, 1, 12 * MIB))
    figures = figures_of(timeline(*spans, steps=((7, 0.0, 4.0), (8, 4.0, 7.0), (9, 7.0, 10.0))))
    assert figures.num_steps == 3
    assert figures.step_seconds == 3
    assert figures.gap_seconds == (2, 0)
    assert figures.copies_in.bytes_per_step == 4 * MIB


def test_an_activity_that_begins_with_a_step_ends_the_gap_before_it():
    spans = (kernel(0, 3), kernel(4, 6), kernel(8, 9))
    assert figures_of(timeline(*spans, steps=((0, 0.0, 4.0), (1, 4.0, 10.0)))).gap_seconds == (1,)


def test_a_copy_that_runs_across_a_boundary_leaves_no_gap():
    spans = (kernel(0, 3), copy(Lane.OUT, 2, 6), kernel(6, 9))
    assert figures_of(timeline(*spans, steps=((0, 0.0, 4.0), (1, 4.0, 10.0)))).gap_seconds == (0,)


def test_a_timeline_without_steps_is_one_step_to_its_end():
    figures = figures_of(Timeline("measured", (kernel(0, 2), Span(Lane.STALL, "wait", 2, 4)), ()))
    assert (figures.num_steps, figures.window_seconds, figures.utilization) == (1, 4, 0.5)
    assert figures.stall_seconds == 2


def test_pageable_copies_are_refused_with_their_number_and_bytes():
    spans = (copy(Lane.OUT, 0, 1, 3 * MIB, is_pageable=True), copy(Lane.IN, 1, 2, 5, is_pageable=True))
    figures = figures_of(timeline(*spans))
    assert (figures.num_pageable, figures.pageable_bytes) == (1, 3 * MIB)
    assert figures.invalid.startswith("1 of the copies, 3.00 MiB, went through pageable host memory")


def test_a_window_without_duration_is_refused():
    with pytest.raises(TraceError, match="no duration"):
        figures_of(Timeline("nsys", (), ()))
