"""Collects the step records of enabled models during a profile, as one trace per device.

On the CPU, compute is the time of the models' graphs and the optimizers' steps, without waits for copies. On a GPU it
is the time from a graph's first kernel to its last, without waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lmswap import api
from lmswap.errors import OptionError
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.schedule import schedule
from lmswap.ir.timeline import Lane, Span, Step
from lmswap.profiling.trace import Stall, Trace, make_timeline
from lmswap.runtime.step_record import StepRecord
from lmswap.session.planned_step import PlannedStep
from lmswap.session.session import Session

TOOL = "lmswap's record"
_NOTES = {
    "cpu": "compute is the enabled models' graphs and the optimizers' steps; the loss and the rest count as idle",
    "cuda": "compute is each graph from its first kernel to its last, less waiting; loss and optimizer are not seen",
}


class EngineRecorder:
    """Collects the records of every model that is enabled at its creation.

    Raises:
        OptionError: none is.
    """

    def __init__(self) -> None:
        self._sessions = api.sessions()
        if not self._sessions:
            raise OptionError(
                "no model is enabled in this process, so lmswap has no record of its own: "
                "call lmswap.enable(model, ...) before the window, or profile with the tool kineto"
            )
        self._records: list[tuple[Session, StepRecord, PlannedStep | None]] = []
        self._optimizing: list[Span] = []
        self._ends: list[Callable[[], None]] = []

    def start(self, number: int) -> None:
        """Start; earlier steps are not recorded."""
        for session in self._sessions:
            session.recorder.last()
            observer = partial(self._take, session)
            session.recorder.observers.append(observer)
            self._ends.append(partial(session.recorder.observers.remove, observer))

    def step_ended(self, number: int) -> None:
        """Read what the engines have recorded so far, while the plan that the step followed is still in force."""
        for session in self._sessions:
            session.recorder.last()

    def stop(self) -> None:
        """Stop; a step that has not ended is not recorded."""
        for session in self._sessions:
            session.recorder.last()
        for end in self._ends:
            end()
        self._ends.clear()

    def optimizer_ran(self, name: str, began: float, ended: float) -> None:
        """Add an optimizer's step, in seconds of `time.perf_counter`."""
        self._optimizing.append(Span(Lane.COMPUTE, f"{name}.step", began, ended))

    def traces(self, steps: Sequence[Step]) -> tuple[Trace, ...]:
        """Return one trace per device, cut to ``steps``, whose times are those of `time.perf_counter`."""
        return tuple(self._trace(device, list(steps)) for device in dict.fromkeys(map(_device, self._sessions)))

    def _take(self, session: Session, record: StepRecord) -> None:
        graphs = tuple(dict.fromkeys(run.key[0] for run in record.segments))
        self._records.append((session, record, session.plans.get(graphs)))

    def _trace(self, device: str, steps: list[Step]) -> Trace:
        own = [taken for taken in self._records if _device(taken[0]) == device]
        sessions = [session for session in self._sessions if _device(session) == device]
        kind = sessions[0].device.type
        links = dict.fromkeys(str(session.options.link) for session in sessions if session.options.link is not None)
        spans = list(self._optimizing) if kind == "cpu" else []
        memory: list[tuple[float, int]] = []
        for _, record, step in own:
            found = record.timeline(_names(record, step))
            spans += [span.shifted(record.begun_seconds) for span in found.spans]
            memory += [(seconds + record.begun_seconds, nbytes) for seconds, nbytes in found.memory]
        num_models = len({id(session) for session, _, _ in own})
        start, end = steps[0].start_seconds, steps[-1].end_seconds
        within = [(record, step) for _, record, step in own if start <= record.begun_seconds < end]
        return Trace(
            tool=TOOL,
            device=device,
            # Curves of several models cannot be separated: each counts all tensors on the device.
            timeline=make_timeline(TOOL, spans, steps, tuple(memory) if num_models == 1 else ()),
            stalls=_merge_waits(wait for record, step in within if step is not None for wait in _waits(record, step)),
            notes=(_NOTES[kind],),
            emulated_link=", ".join(links),
        )


def _device(session: Session) -> str:
    return session.memory.description()


def _names(record: StepRecord, step: PlannedStep | None) -> Sequence[str]:
    if step is not None:
        return step.merged.program.buffer_names
    return [f"buffer {number}" for number in range(1 + max((r.swap for r in record.transfers), default=0))]


def _waits(record: StepRecord, step: PlannedStep) -> Iterator[tuple[str, str, str, Lane, float]]:
    """Yield every wait of a step: op, its source line, buffer, direction, seconds.

    Copies of one buffer in one direction run in the order of the plan.
    """
    program = step.merged.program
    runs = schedule(program, step.plan.recomputes)
    due = _positions(step.plan, runs.buffers)
    for transfer in sorted(record.transfers, key=lambda transfer: transfer.queued_seconds):
        lane = Lane.IN if transfer.is_in else Lane.OUT
        position = next(due[transfer.swap, lane], None)
        seconds = transfer.wait_end_seconds - transfer.wait_start_seconds
        if seconds > 0:
            yield *_op_waiting_at(runs.program, position, lane), program.buffer_names[transfer.swap], lane, seconds


def _op_waiting_at(program: Program, position: int | None, lane: Lane) -> tuple[str, str]:
    """Return the op before which compute waits, and its source line; swap-outs may be waited for at a segment's end."""
    if position is None:
        return "unknown: replanned", ""
    before = program.segment_of(position - 1)
    if lane is Lane.OUT and position == before.stop:
        return f"end of {before.phase}", ""
    return program.ops[position].name, program.ops[position].source


def _positions(plan: Plan, buffers: Sequence[int]) -> defaultdict[tuple[int, Lane], Iterator[int]]:
    """Return, by buffer and direction, the ops before which compute waits for its copies, in order."""
    found: defaultdict[tuple[int, Lane], list[int]] = defaultdict(list)
    for swap in sorted(plan.swaps, key=lambda swap: swap.release):
        if swap.out_start is not None:
            found[buffers[swap.buffer], Lane.OUT].append(swap.release)
        found[buffers[swap.buffer], Lane.IN].append(swap.first_use)
    return defaultdict(lambda: iter(()), {key: iter(positions) for key, positions in found.items()})


def _merge_waits(waits: Iterator[tuple[str, str, str, Lane, float]]) -> tuple[Stall, ...]:
    seconds: defaultdict[tuple[str, str, str, Lane], list[float]] = defaultdict(list)
    for *key, waited in waits:
        seconds[tuple(key)].append(waited)  # type: ignore[index]
    stalls = (Stall(*key, num=len(waited), seconds=sum(waited)) for key, waited in seconds.items())
    return tuple(sorted(stalls, key=lambda stall: -stall.seconds))
