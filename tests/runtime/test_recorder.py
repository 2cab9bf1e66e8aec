"""The sequences of segments that form a step, and the steps that the recorder detects in them."""

from __future__ import annotations

import itertools
import sys
import time

import pytest

from lmswap.runtime import recorder as recorder_module
from lmswap.runtime._C import TransferRecord
from lmswap.runtime.recorder import _MAX_UNCLAIMED, STEPS_PER_LAP, Recorder
from lmswap.runtime.step_record import NO_PEAKS, EndedStep, Peaks, SegmentRun, StepRecord
from tests.capture.test_interrupts import Stop, handling, interrupt_at

STREAM = lambda: 0  # noqa: E731
STEP = EndedStep(1, ((0, "forward"), (0, "backward")), (0,), NO_PEAKS)


class Ticks:
    """An engine whose marks tick: each has passed one second after the one before."""

    can_hold = staticmethod(lambda: False)

    def __init__(self) -> None:
        self.marks = 0
        self.taken: list[int] = []
        self.forgotten: list[list[int]] = []

    def mark(self, stream: int) -> int:
        self.marks += 1
        return self.marks

    def take_mark(self, mark: int) -> float:
        self.taken.append(mark)
        return float(mark)

    def take_records(self):
        return []

    def forget_marks(self, marks: list[int]) -> None:
        self.forgotten.append(marks)

    def forget_records(self, stop_seconds: float) -> None:
        assert stop_seconds > 0.0


class Memory:
    """Its bytes are counted up by each look; half a tick after the first it held 7."""

    def __init__(self, reports_changes: bool = True) -> None:
        self.looks = self.laps = 0
        self._reports_changes = reports_changes

    def reports_changes(self) -> bool:
        return self._reports_changes

    def used_tensor_bytes(self) -> int:
        self.looks += 1
        return self.looks

    def tensor_changes(self, start_seconds: float, stop_seconds: float) -> list[tuple[float, int]]:
        assert stop_seconds > start_seconds
        return [(start_seconds + 0.5, 7)] if self._reports_changes else []

    def lap_peaks(self, *, restart=False) -> tuple[int, int]:
        self.laps += restart
        return 100 * (self.laps + (not restart)), self.laps - restart

    def lap_tensor_peak_bytes(self) -> int:
        return self.laps


def recorded(text):
    """The steps of segments such as "f0 f1 b1 b0 | f0 b0": graph 0 forward, and so on; "|" requests a report."""
    recorder, steps = Recorder(Ticks(), Memory(), STREAM), []
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
        ("f0 f0 b0 | b0 f0 b0", ["f0", "f0 b0", "b0", "f0 b0"]),  # a request in mid-step cuts it
        ("f0 b0 b0 f0 b0", ["f0 b0 b0", "f0 b0"]),  # retain_graph
    ],
)
def test_a_step_is_from_the_first_forward_to_the_last_backward(segments, steps):
    assert recorded(segments) == steps


def test_memory_is_sampled_at_marks_and_by_allocator_events_between_them():
    recorder = Recorder(Ticks(), Memory(), STREAM)
    for phase in ("forward", "backward"):
        with recorder.segment((0, phase)):  # marks for start and end
            recorder.sample_memory()  # which the allocator reports
    assert recorder.last().memory == ((1.0, 1), (1.5, 7), (2.0, 2), (3.0, 3), (4.0, 4))


class Planned:
    """Steps of a planned graph whose forward and backward take memory twice each."""

    def __init__(self, *, reports_changes: bool = False) -> None:
        self.clock, self.memory = Ticks(), Memory(reports_changes)
        self.recorder = Recorder(self.clock, self.memory, STREAM)

    def run(self, follows=(0,), phases=("forward", "backward")) -> int:
        """How often memory was looked at."""
        looks = self.memory.looks
        self.recorder.end_if_complete()
        for phase in phases:
            with self.recorder.segment((0, phase), lambda: follows):
                self.recorder.sample_memory()
                self.recorder.sample_memory()
        return self.memory.looks - looks


def test_memory_without_change_events_is_sampled_until_it_is_known():
    steps = Planned()
    assert [steps.run() for _ in range(4)] == [8, 8, 4, 4]  # the first is read when the second has ended
    marks, taken = steps.clock.marks, len(steps.clock.taken)
    steps.run()
    assert steps.clock.marks == marks + 4
    assert len(steps.clock.taken) == taken + 1
    assert len(steps.clock.forgotten[-1]) == 3  # of the step before


def test_known_memory_is_part_of_the_record_and_of_the_peak():
    steps = Planned()
    for _ in range(3):
        steps.run()
    # Looks 17 to 20 at ticks 17 to 20; in between memory rises as it did: by 1 at a third of the way, and 2 at two.
    expected = [(17, 17), (17 + 1 / 3, 18), (17 + 2 / 3, 19), (18, 18), (19, 19), (19 + 1 / 3, 20), (19 + 2 / 3, 21)]
    record = steps.recorder.last()
    assert [*record.memory] == [pytest.approx(point) for point in [*expected, (20, 20)]]
    assert record.step.peaks.tensor_bytes == 21


@pytest.mark.parametrize(
    "ask",
    [
        lambda steps: steps.recorder.time_ops(),
        lambda steps: steps.recorder.observers.append(lambda record: None),
        lambda steps: steps.recorder.forget_curves(),
    ],
)
def test_memory_is_sampled_again_on_request_or_for_another_plan(ask):
    steps = Planned()
    for _ in range(3):
        steps.run()
    steps.recorder.end_if_complete()
    ask(steps)
    assert steps.run() == 8


def test_memory_of_unplanned_segments_is_always_sampled():
    steps = Planned()
    assert [steps.run(()) for _ in range(4)] == [8] * 4
    assert steps.clock.forgotten == []


def test_only_the_last_step_and_the_last_training_step_are_read():
    steps, seen = Planned(reports_changes=True), []
    for phases in [("forward", "backward")] * 3 + [("inference",)] * 3:
        steps.run(phases=phases)
    assert len(steps.clock.forgotten) == 4 - 1  # steps 1, 2 and 4; step 5 is not over yet
    assert steps.recorder.last_training().step.number == 3
    assert steps.recorder.last().step.number == 6
    steps.recorder.observers.append(lambda record: seen.append(record.step.number))
    for _ in range(3):
        steps.run()
    steps.recorder.last()
    assert seen == [7, 8, 9]


def test_ops_are_timed_in_the_requested_step_only():
    recorder, records = Recorder(Ticks(), Memory(), STREAM), []
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


def test_time_that_compute_waits_is_not_op_time():
    def copied(wait_start: float, wait_end: float) -> TransferRecord:
        return TransferRecord(0, True, 8, 0.0, 0.0, 1.0, wait_start, wait_end)

    forward = SegmentRun((0, "forward"), 10.0, (12.0, 15.0), 20.0)
    backward = SegmentRun((0, "backward"), 30.0, (), 36.0)
    waits = copied(31.0, 33.0), copied(0.0, 0.0), copied(13.0, 13.5), copied(13.5, 14.0), copied(19.0, 20.0)
    assert StepRecord(STEP, (forward, backward), (), waits).op_seconds() == ((2.0, 2.0, 4.0), (4.0,))


def test_an_op_timed_by_two_readings_of_a_gpu_clock_took_no_negative_time():
    run = SegmentRun((0, "forward"), 1.0, (2.0, 1.75), 3.0)
    assert StepRecord(STEP, (run,), (), ()).op_seconds() == ((1.0, 0.0, 1.0),)


def test_forwards_without_a_backward_do_not_pile_up():
    clock = Ticks()
    recorder = Recorder(clock, Memory(), STREAM)
    for _ in range(3 * _MAX_UNCLAIMED):
        with recorder.segment((0, "forward")):
            pass
    assert recorder.num_steps >= 2 * _MAX_UNCLAIMED - 1


def test_a_step_has_the_peaks_of_all_that_ran_since_the_one_before_it():
    recorder = Recorder(Ticks(), Memory(), STREAM)
    for key in [(0, "forward"), (0, "backward"), (0, "forward"), (0, "forward"), (0, "backward"), (0, "backward")]:
        assert recorder.complete() is None or key[1] == "forward"
        with recorder.segment(key):
            recorder.note_tier_bytes(10 * (recorder.num_steps + 1))
    assert recorder.complete().peaks == (300, 2, 20)  # the second forward began a lap of its own
    recorder.last()
    first, second = recorder.take_ended()
    assert (first.number, first.peaks, second.number, second.peaks) == (1, (100, 0, 10), 2, (300, 2, 20))
    assert not recorder.take_ended()
    assert recorder.highest == second


def test_a_step_follows_a_plan_if_all_of_it_did_to_the_end():
    recorder, plans = Recorder(Ticks(), Memory(), STREAM), iter([(0,), (0,), (1,), (), (2,), (2, 3), (2, 3)])
    for segment in [(0, "forward"), (0, "backward")] * 2 + [(9, "inference"), (2, "forward"), (2, "backward")]:
        with recorder.segment(segment, lambda: next(plans)):
            pass
    recorder.last()
    assert [step.follows for step in recorder.take_ended()] == [(0,), (), (2, 3)]


def test_the_last_training_step_is_reported_after_later_calls():
    recorder = Recorder(Ticks(), Memory(), STREAM)
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


def test_the_end_of_a_run_interrupted_in_an_earlier_step_is_not_recorded():
    clock = Ticks()
    recorder = Recorder(clock, Memory(), STREAM)
    with recorder.segment((0, "forward")):
        pass
    broken_off = recorder.begin_segment((0, "backward"))
    for _ in range(3):
        for phase in ("forward", "backward"):
            with recorder.segment((1, phase)):
                if phase == "backward":
                    recorder.end_segment((0, "backward"), broken_off)
    assert [run.key for run in recorder.last().segments] == [(1, "forward"), (1, "backward")]
    assert len({*clock.taken}) == len(clock.taken)


class Interrupted(Ticks):
    """Of which call ``number`` ends with what a signal's handler raises, when it has done its work."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def interrupt(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def mark(self, stream: int) -> int:
        mark = super().mark(stream)
        self.interrupt()
        return mark

    def take_mark(self, mark: int) -> float:
        assert mark not in self.taken
        seconds = super().take_mark(mark)
        self.interrupt()
        return seconds

    def forget_marks(self, marks: list[int]) -> None:
        super().forget_marks(marks)
        self.interrupt()


class InterruptedMemory(Memory):
    """Likewise."""

    def __init__(self, clock: Interrupted, reports_changes: bool) -> None:
        super().__init__(reports_changes)
        self.clock = clock

    def used_tensor_bytes(self) -> int:
        self.clock.interrupt()
        return super().used_tensor_bytes()

    def lap_peaks(self, **given) -> tuple[int, int]:
        self.clock.interrupt()
        peaks = super().lap_peaks(**given)
        self.clock.interrupt()
        return peaks


@pytest.mark.parametrize("reports_changes", [True, False])
def test_an_interrupt_at_any_moment_loses_no_step_that_comes_later(reports_changes):
    for number in itertools.count(1):
        clock = Interrupted(number)
        recorder = Recorder(clock, InterruptedMemory(clock, reports_changes), STREAM)

        def run(text, recorder=recorder):
            for word in text.split():
                if word[0] == "f":
                    recorder.end_if_complete()
                with recorder.segment((int(word[1:]), {"f": "forward", "b": "backward"}[word[0]])):
                    pass

        try:
            run("f0 b0 f0 f1 b1 b0 f0 f0 b0 f0 b0 f0 b0")
            recorder.last()
        except KeyboardInterrupt:
            pass
        has_been = clock.left <= 0
        clock.left = 0
        for _ in range(3):
            run("f2 f3 b3 b2")
        record = recorder.last()
        assert [run.key for run in record.segments] == [
            (2, "forward"),
            (3, "forward"),
            (3, "backward"),
            (2, "backward"),
        ]
        if not has_been:
            break
    assert number > 50


def test_a_step_that_a_handler_interrupts_at_any_instruction_ends_with_what_ran():
    for point in itertools.count(1):
        clock = Ticks()
        recorder = Recorder(clock, Memory(), STREAM)
        trace, counts = interrupt_at(point)
        with handling():
            sys.settrace(trace)
            try:
                for phase in ("forward", "backward", "forward", "backward"):
                    with recorder.segment((0, phase)):
                        pass
            except Stop:
                pass
            finally:
                sys.settrace(None)
        for phase in ("forward", "backward"):
            with recorder.segment((0, phase)):
                pass
        recorder.end_if_complete()
        assert all(step.sequence for step in recorder.take_ended())
        record = recorder.last()
        assert record.step.sequence == tuple(run.key for run in record.segments)
        if counts[0] < point:
            break
    assert point > 100


def test_buffers_unknown_to_the_plan_are_named_by_number():
    moved = [TransferRecord(number, False, 8, 0.0, 0.0, 1.0, 0.0, 0.0) for number in (0, 1, 7)]
    record = StepRecord(STEP, (SegmentRun((0, "forward"), 0.0, (), 2.0),), (), tuple(moved))
    names = [span.name for span in record.timeline(("conv", "relu")).spans if span.nbytes]
    assert names == ["conv", "relu", "buffer 7"]


def test_time_of_marks_between_ops_is_not_launch_overhead():
    class Slow(Ticks):
        def mark(self, stream: int) -> int:
            time.sleep(0.02)
            return super().mark(stream)

    recorder, clock = Recorder(Slow(), Memory(), STREAM), time.perf_counter()
    recorder.time_ops()
    with recorder.segment((0, "forward")):
        for _ in range(20):
            recorder.begin_op()
    with recorder.segment((0, "backward")):
        pass
    forward = recorder.last().segments[0]
    assert time.perf_counter() - clock > 20 * 0.02
    assert 0 <= forward.queued_seconds - forward.begun_seconds < 10 * 0.02  # marks at both ends are


class Holding(Ticks):
    """Which notes when the device is held, let go and marked."""

    can_hold = staticmethod(lambda: True)

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def hold(self, stream: int, max_seconds: float) -> None:
        self.log.append("hold")

    def let_go(self) -> None:
        self.log.append("let go")

    def mark(self, stream: int) -> int:
        self.log.append("mark")
        return super().mark(stream)


def test_a_device_is_held_while_ops_that_are_timed_are_queued(monkeypatch):
    monkeypatch.setattr(recorder_module, "_OPS_HELD", 2)
    recorder = Recorder(clock := Holding(), Memory(), STREAM)
    recorder.time_ops()
    with recorder.segment((0, "forward")):
        for _ in range(3):
            recorder.begin_op()
    assert clock.log == ["mark", "hold", *4 * ["mark"], "let go", "hold", "mark", "mark", "let go", "mark"]
    clock.log.clear()
    with recorder.segment((0, "backward")):
        pass
    assert clock.log == ["mark", "hold", "mark", "mark", "let go", "mark"]
    step = recorder.last()
    assert step.op_seconds() == ((1.0, 1.0, 1.0, 1.0), (1.0,))  # a tick each, without those of holds
    assert step.host_seconds() == (None, None)  # whatever the clocks say
    spans = [(span.lane, span.seconds) for span in step.timeline(()).spans]
    assert spans == [("compute", 2.0), ("host", 1.0), ("compute", 2.0), ("compute", 1.0)]
    assert sorted(clock.taken) == list(range(1, clock.marks + 1))
    with recorder.segment((0, "forward")):
        recorder.begin_op()
    assert "hold" not in clock.log[5:]


def test_a_run_that_is_broken_off_lets_the_device_go():
    recorder = Recorder(clock := Holding(), Memory(), STREAM)
    recorder.time_ops()
    with pytest.raises(ZeroDivisionError), recorder.segment((0, "forward")):
        raise ZeroDivisionError
    assert clock.log[-2:] == ["let go", "mark"]


def test_a_step_is_host_bound_if_the_device_catches_up_with_the_host():
    waited_for = SegmentRun((0, "forward"), 0.0, (), 2.0, begun_seconds=0.5, queued_seconds=1.99)
    waiting = SegmentRun((0, "backward"), 2.0, (), 6.0, begun_seconds=2.0, queued_seconds=3.0)
    record = StepRecord(STEP, (waited_for, waiting), (), ())
    assert record.host_bound_seconds == 2.0
    assert record.host_seconds() == (1.49, None)


def repeating(max_tensor_bytes):
    """A recorder that expects repetitions of its first step, "f0 b0", and what runs such a step."""
    recorder = Recorder(Ticks(), Memory(), STREAM)

    def run(segments="f0 b0"):
        for word in segments.split():
            with recorder.segment((int(word[1:]), {"f": "forward", "b": "backward"}[word[0]])):
                pass
        recorder.end_if_complete()
        return recorder.ended

    run()
    recorder.expect_repeats(max_tensor_bytes)
    return recorder, run


def test_the_peaks_of_repeated_steps_are_read_together_at_a_stated_interval():
    recorder, run = repeating(max_tensor_bytes=5)
    repeated = [run() for _ in range(STEPS_PER_LAP - 1)]
    assert {step.peaks for step in repeated} == {Peaks(100, 0)}
    assert [step.number for step in repeated] == [*range(2, STEPS_PER_LAP + 1)]
    assert run().peaks.used_bytes == 200
    assert (recorder.ended.lap_begins, recorder.ended.number) == (2, STEPS_PER_LAP + 1)
    assert not recorder.expects_repeat
    assert run().lap_begins == recorder.num_steps


@pytest.mark.parametrize(
    ("max_tensor_bytes", "segments"), [(0, "f0 b0"), (5, "f1 b1"), (5, "f0 b0 b0")], ids=["grown", "another", "twice"]
)
def test_the_peaks_of_a_step_that_is_no_repetition_are_its_own(max_tensor_bytes, segments):
    recorder, run = repeating(max_tensor_bytes)
    assert run(segments).peaks.used_bytes == 200
    assert not recorder.expects_repeat


def test_a_repetition_whose_peaks_were_not_read_is_not_repeated_in_turn():
    recorder, run = repeating(max_tensor_bytes=5)
    run()
    recorder.expect_others()
    recorder.expect_repeats(5)
    assert run().peaks.used_bytes == 200


def test_a_report_reads_the_peaks_of_a_repeated_step():
    recorder, _ = repeating(max_tensor_bytes=5)
    for phase in ("forward", "backward"):
        with recorder.segment((0, phase)):
            pass
    assert recorder.last().step.peaks.used_bytes == 200
