"""Live ranges and gaps, on steps where they can be read off."""

from __future__ import annotations

import pytest
from hypothesis import given

from lmswap.analyze.liveness import Gap, LiveRange, gaps, live_ranges, swappable_gaps
from lmswap.errors import CaptureError
from tests.ir.build import build
from tests.ir.strategies import steps

STEP = build(
    """
    forward
    f1 1: x W -> a
    f2 1: a -> b
    f3 1: b -> y
    backward
    g3 1: b -> c
    g2 1: t c -> gw
    g1 1: a c -> gx
    """,
    sizes={"b": 3},
    outputs="y",
    tangents="t",
    gradients="gw gx",
)


def test_kinds_decide_how_long_a_buffer_lives():
    ranges = live_ranges(STEP.program)
    spans = {STEP.program.buffer_names[buffer]: (found.start, found.stop) for buffer, found in ranges.items()}
    assert spans == {
        "a": (0, 6),  # activation: to after its last use
        "b": (1, 4),
        "c": (3, 6),
        "y": (2, 6),  # output: to the end of the step
        "gw": (4, 6),  # gradient: to the end of the step
        "gx": (5, 6),
        "t": (3, 6),  # tangent: the whole segment that reads it; its caller holds it
    }  # x and W live outside the step


def test_released_outputs_live_as_long_as_the_step_needs_them():
    saved = build(
        """
        forward
        f1 1: x -> a
        f2 1: a -> y
        f3 1: a -> z
        f4 1: y -> k
        backward
        g3 1: t k -> c
        g2 1: c y -> gx
        g1 1: c -> gw
        """,
        outputs="y z",
        tangents="t",
        gradients="gw gx",
    )
    ranges = live_ranges(saved.program, {saved.id(name) for name in "yzt"})
    spans = {saved.program.buffer_names[buffer]: (found.start, found.stop) for buffer, found in ranges.items()}
    assert [spans[name] for name in "yzt"] == [(1, 6), (2, 4), (4, 5)]  # z is returned when its segment ends
    others = {buffer: found for buffer, found in ranges.items() if saved.program.buffer_names[buffer] not in "yzt"}
    assert others.items() <= live_ranges(saved.program).items()


def test_uses_are_reads_and_writes_and_gaps_are_between_them():
    found = live_ranges(STEP.program)[STEP.id("a")]
    assert found == LiveRange(STEP.id("a"), 0, 6, uses=(0, 1, 5), writes=(0,))
    assert gaps(found) == (Gap(STEP.id("a"), 1, 5),)  # ops 0 and 1 follow each other: no gap


def test_gaps_of_small_or_unswappable_buffers_do_not_count():
    assert {gap.buffer for gap in swappable_gaps(STEP.program, live_ranges(STEP.program), 0)} == {STEP.id("a")}
    assert swappable_gaps(STEP.program, live_ranges(STEP.program), 2) == ()


def test_gaps_between_segments_that_cannot_pass_values_do_not_count():
    step = build(
        """
        forward 0
        f1 1: x -> a e k
        f2 1: a -> y
        forward 1
        h1 1: y -> b
        h2 1: a b -> z
        backward 1
        i1 1: tz -> gz
        i2 1: a k gz -> gy
        backward 0
        g1 1: ty -> c
        g2 1: e c -> gx
        """,
        outputs="y z",
        tangents="ty tz",
        gradients="gx gy",
    )
    a, e = step.id("a"), step.id("e")
    # a: f2 → h2 is from forward 0 to forward 1; h2 → i2 is within graph 1, as f1 → g2 is for e within graph 0; k goes
    # from forward 0 to backward 1.
    assert swappable_gaps(step.program, live_ranges(step.program), 0) == (Gap(a, 3, 5), Gap(e, 0, 7))


@pytest.mark.parametrize("text", ["f1 1: a -> a", "f1 1: a x -> b\nf2 1: b -> a"])
def test_reading_before_writing_is_an_error(text: str):
    step = build(f"inference\nf0 1: x -> z\n{text}\nf9 1: a -> y", outputs="a")
    with pytest.raises(CaptureError, match="op 1 'f1' reads output 'a' before any op has written it"):
        live_ranges(step.program)


@given(steps())
def test_every_use_is_in_the_live_range_and_no_use_in_a_gap(step):
    for found in live_ranges(step.program).values():
        assert all(found.start <= use < found.stop for use in found.uses)
        assert set(found.writes) <= set(found.uses)
        for gap in gaps(found):
            assert gap.after in found.uses
            assert gap.before in found.uses
            assert not any(gap.after < use < gap.before for use in found.uses)
