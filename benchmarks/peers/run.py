"""Models × ways × budgets, one after another, each in a process of its own → an outcome each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from benchmarks.peers.cell import REFERENCE, Cell, Outcome, run_cell
from benchmarks.peers.ways import PEERS


@dataclass(frozen=True)
class Choice:
    """What to run; the budgets are in per cent of what the reference's peak is."""

    models: Sequence[str]
    percents: Sequence[int]
    policies: Sequence[str]
    peers: Sequence[str]
    size: str
    device: str


def run_all(choice: Choice) -> Iterator[Outcome]:
    """Runs, for each model, the reference first; what does not fit or breaks is an outcome too."""
    for model in choice.models:
        reference = run_fresh(Cell(model, choice.size, choice.device, REFERENCE, None, None))
        yield replace(reference, is_exact=True if reference.bits else None)
        if reference.peak_bytes is None:
            continue
        for cell in _cells(choice, model, reference.peak_bytes):
            outcome = run_fresh(cell)
            yield replace(outcome, is_exact=outcome.bits == reference.bits if outcome.bits else None)


def _cells(choice: Choice, model: str, peak_bytes: int) -> Iterator[Cell]:
    for way in choice.peers:
        for percent in choice.percents if PEERS[way].has_dial else [None]:
            yield Cell(model, choice.size, choice.device, way, percent, None)
    for percent in choice.percents:
        for policy in choice.policies:
            yield Cell(model, choice.size, choice.device, policy, percent, peak_bytes * percent // 100)


def run_fresh(cell: Cell) -> Outcome:
    """Runs a cell in a fresh process, which has imported what it needs but has run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.peers.cell", "lmswap.api", "torch._dynamo", "scipy.optimize"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        try:
            return process.submit(run_cell, cell).result()
        except BrokenProcessPool:
            return Outcome(cell, "failed", detail="the process was killed, perhaps for want of memory")
