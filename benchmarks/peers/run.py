"""A model, ways × budgets, each in a process of its own, on a CPU in turns → an outcome each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.peers.cell import REFERENCE, Bits, Cell, Outcome, run_cell
from benchmarks.peers.ways import PEERS
from benchmarks.turns import train_in_turns
from lmswap.hardware.host_memory import read_host_memory

# The modules of a training, beside the largest peak of any way.
_PROCESS_BYTES = 2**29
# With 14 at a time, 20 s lay between a step and the reference's: long enough for a machine to change its speed.
_MAX_TOGETHER = 6
_PRELOAD = ("benchmarks.peers.cell", "lmswap.api", "torch._dynamo", "scipy.optimize")


@dataclass(frozen=True)
class Choice:
    """What to run; the budgets are in per cent of what the reference's peak is."""

    percents: Sequence[int]
    policies: Sequence[str]
    peers: Sequence[str]
    size: str
    device: str


def run_model(choice: Choice, model: str) -> Iterator[Outcome]:
    """Train ``model`` in all chosen ways and under all budgets, after the reference without any.

    Yields:
        The outcome of each cell, compared with a reference measured in the same minutes; what does not fit or breaks
        is an outcome too.
    """
    (reference,) = run_in_turns([Cell(model, choice.size, choice.device, REFERENCE, None, None)])
    yield _compared(reference, reference)
    if reference.peak_bytes is None:
        return
    cells = list(_cells(choice, model, reference.peak_bytes))
    if choice.device != "cpu":  # a GPU is used by this process only: one at a time
        for cell in cells:
            (outcome,) = run_in_turns([cell])
            yield _compared(outcome, reference)
        return
    # A CPU's speed changes with what its neighbours do: a reference of their own sees the same minutes.
    for group in _groups(cells, reference.peak_bytes):
        beside, *outcomes = run_in_turns([reference.cell, *group])
        yield from (_compared(outcome, beside) for outcome in outcomes)


def _cells(choice: Choice, model: str, peak_bytes: int) -> Iterator[Cell]:
    for way in choice.peers:
        for percent in choice.percents if PEERS[way].has_dial else [None]:
            yield Cell(model, choice.size, choice.device, way, percent, None)
    for percent in choice.percents:
        for policy in choice.policies:
            yield Cell(model, choice.size, choice.device, policy, percent, peak_bytes * percent // 100)


def _groups(cells: Sequence[Cell], peak_bytes: int) -> Iterator[Sequence[Cell]]:
    """Yields groups of cells that fit in main memory together, with ``peak_bytes`` for each."""
    room = read_host_memory().available_bytes // (peak_bytes + _PROCESS_BYTES) - 1
    count = max(1, min(_MAX_TOGETHER, room))
    for start in range(0, len(cells), count):
        yield cells[start : start + count]


def _compared(outcome: Outcome, reference: Outcome) -> Outcome:
    """``outcome`` with its median overhead over ``reference`` by turns, and the first step of other bits."""
    if not outcome.bits:
        return outcome
    ratios = [mine / its for mine, its in zip(outcome.step_seconds, reference.step_seconds, strict=False)]
    overhead = statistics.median(ratios) if ratios else None
    steps = enumerate(zip(outcome.bits, reference.bits, strict=True), start=1)
    other_from_step, others = next(((step, _others(*bits)) for step, bits in steps if _others(*bits)), (None, ()))
    return replace(outcome, other_from_step=other_from_step, others=others, overhead=overhead)


def _others(mine: Bits, its: Bits) -> tuple[str, ...]:
    return tuple(name for name in {**its, **mine} if mine.get(name) != its.get(name))


def run_in_turns(cells: Sequence[Cell]) -> list[Outcome]:
    """Run ``cells`` in turns, see `train_in_turns`."""
    return train_in_turns(run_cell, cells, lambda cell, why: Outcome(cell, "failed", detail=why), preload=_PRELOAD)
