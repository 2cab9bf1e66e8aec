"""Which segments make a step? Sequences of segments and the steps that the recorder sees in them."""

from __future__ import annotations

import pytest

from lmswap.execute._C import TransferRecord
from lmswap.execute.record import _MOST_WAITING, NO_PEAKS, EndedStep, Recorder, SegmentRun, StepRecord

STEP = EndedStep(1, ((0, "forward"), (0, "backward")), (0,), NO_PEAKS)


class Ticks:
    """A clock that counts its marks."""

    def __init__(self) -> None:
        self.marks = 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def take_mark(self, mark: int) -> float:
        return float(mark)

    def take_records(self):
        return []


class Memory:
    """Its bytes are counted up by each look; half a tick after the first it held 7."""

    def __init__(self) -> None:
        self.looks = self.laps = 0

    def used_tensor_bytes(self) -> int:
        self.looks += 1
        return self.looks

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> list[tuple[float, int]]:
        assert stop_seconds > start_seconds
        return [(start_seconds + 0.5, 7)]

    def start_lap(self) -> None:
        self.laps += 1

    def lap_peaks(self) -> tuple[int, int]:
        return 100 * (self.laps + 1), self.laps


def recorded(text):
    """The steps of segments such as "f0 f1 b1 b0 | f0 b0": graph 0 forward, and so on; "|" asks for a report."""
    recorder, steps = Recorder(Ticks(), Memory()), []
    recorder.observers.append(
        lambda record: steps.append(" ".join(f"{phase[0]}{graph}" for (graph, phase), *_ in record.segments))
    )
    for word in text.split():
        if word == "|":
            recorder.last()
            continue
        if word[0] != "b":
            recorder.end_if_complete()  # as the session does before a graph runs forward
        with recorder.segment((int(word[1:]), {"f": "forward", "b": "backward", "i": "inference"}[word[0]])):
            pass
    recorder.last()
    return steps


@pytest.mark.parametrize(
    ("segments", "steps"),
    [
        ("f0 b0 f0 b0", ["f0 b0", "f0 b0"]),
        ("f0 f1 b1 b0 f0 f1 b1 b0", ["f0 f1 b1 b0"] * 2),
        ("f0 f1 f0 f1 b1 b0 b1 b0", ["f0 f1 f0 f1 b1 b0 b1 b0"]),  # the same graphs for two layers
        ("f0 f1 f1 f1 b1 b1 b1 b0 f0 f1 f1 b1 b1 b0", ["f0 f1 f1 f1 b1 b1 b1 b0", "f0 f1 f1 b1 b1 b0"]),
        ("f0 i1 f2 b2 b0 f0 i1 f2 b2 b0", ["f0 i1 f2 b2 b0"] * 2),  # a graph in the middle that trains nothing
        ("i0 i0 f1 b1", ["i0", "i0", "f1 b1"]),
        ("f0 b0 i1 f0 b0", ["f0 b0", "i1", "f0 b0"]),
        ("f0 f0 f0 b0 f0 b0", ["f0", "f0", "f0 b0", "f0 b0"]),  # forwards whose backward never comes
        ("f0 f0 b0 | b0 f0 b0", ["f0", "f0 b0", "b0", "f0 b0"]),  # who asks in mid-step cuts it
        ("f0 b0 b0 f0 b0", ["f0 b0 b0", "f0 b0"]),  # retain_graph
    ],
)
def test_a_step_is_from_the_first_forward_to_the_last_backward(segments, steps):
    assert recorded(segments) == steps


def test_memory_is_what_was_seen_at_marks_and_what_the_allocator_tells_of_between():
    recorder = Recorder(Ticks(), Memory())
    for phase in ("forward", "backward"):
        with recorder.segment((0, phase)):  # marks for memory, start, end, memory
            pass
    assert recorder.last().memory == ((1.0, 1), (1.5, 7), (4.0, 2), (5.0, 3), (8.0, 4))


def test_ops_are_timed_in_the_one_step_that_it_was_asked_for():
    recorder, records = Recorder(Ticks(), Memory()), []
    recorder.observers.append(records.append)
    recorder.time_ops()
    for _ in range(2):
        for phase in ("forward", "backward"):
            with recorder.segment((0, phase)):
                recorder.begin_op()
                recorder.begin_op()
    recorder.last()
    assert [[len(run.ops) for run in record.segments] for record in records] == [[2, 2], [0, 0]]
    assert [record.op_seconds() for record in records] == [((1.0, 1.0, 1.0),) * 2, ((1.0,),) * 2]


def test_what_compute_waits_for_is_no_ops_time():
    def copied(wait_start: float, wait_end: float) -> TransferRecord:
        return TransferRecord(0, True, 8, 0.0, 0.0, 1.0, wait_start, wait_end)

    forward = SegmentRun((0, "forward"), 10.0, (12.0, 15.0), 20.0)
    backward = SegmentRun((0, "backward"), 30.0, (), 36.0)
    waits = copied(31.0, 33.0), copied(0.0, 0.0), copied(13.0, 13.5), copied(13.5, 14.0), copied(19.0, 20.0)
    assert StepRecord(STEP, (forward, backward), (), waits).op_seconds() == ((2.0, 2.0, 4.0), (4.0,))


def test_forwards_without_a_backward_do_not_pile_up():
    clock = Ticks()
    recorder = Recorder(clock, Memory())
    for _ in range(3 * _MOST_WAITING):
        with recorder.segment((0, "forward")):
            pass
    assert recorder.num_steps >= 2 * _MOST_WAITING - 1


def test_a_step_has_the_peaks_of_all_that_ran_since_the_one_before_it():
    recorder = Recorder(Ticks(), Memory())
    for key in [(0, "forward"), (0, "backward"), (0, "forward"), (0, "forward"), (0, "backward"), (0, "backward")]:
        assert recorder.complete() is None or key[1] == "forward"
        with recorder.segment(key):
            recorder.tier_holds(10 * (recorder.num_steps + 1))
    assert recorder.complete().peaks == (300, 2, 20)  # the second forward began a lap of its own
    recorder.last()
    first, second = recorder.take_ended()
    assert (first.number, first.peaks, second.number, second.peaks) == (1, (100, 0, 10), 2, (300, 2, 20))
    assert recorder.take_ended() == []
    assert recorder.highest == second


def test_a_step_follows_a_plan_if_all_of_it_did_to_the_end():
    recorder, plans = Recorder(Ticks(), Memory()), iter([(0,), (0,), (1,), (), (2,), (2, 3), (2, 3)])
    for segment in [(0, "forward"), (0, "backward")] * 2 + [(9, "inference"), (2, "forward"), (2, "backward")]:
        with recorder.segment(segment, lambda: next(plans)):
            pass
    recorder.last()
    assert [step.follows for step in recorder.take_ended()] == [(0,), (), (2, 3)]


def test_the_last_training_step_is_told_of_after_others():
    recorder = Recorder(Ticks(), Memory())
    for phase in ("inference", "forward", "backward", "inference", "inference"):
        with recorder.segment((0, phase)):
            pass
        assert recorder.last_training() is not None or phase == "inference"
    recorder.last()
    assert (recorder.last_training().step, recorder.trained.sequence) == (
        recorder.trained,
        ((0, "forward"), (0, "backward")),
    )
    assert recorder.last().step.sequence[-1] == (0, "inference")


def test_what_a_plan_does_not_know_is_called_by_its_number():
    moved = [TransferRecord(number, False, 8, 0.0, 0.0, 1.0, 0.0, 0.0) for number in (0, 1, 7)]
    record = StepRecord(STEP, (SegmentRun((0, "forward"), 0.0, (), 2.0),), (), tuple(moved))
    names = [span.name for span in record.timeline(("conv", "relu"), other_bytes=0).spans if span.nbytes]
    assert names == ["conv", "relu", "buffer 7"]
