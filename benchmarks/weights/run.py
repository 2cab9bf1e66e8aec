"""All ways of a task, each in a process of its own, on a CPU in turns → an outcome each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from benchmarks.turns import train_in_turns
from benchmarks.weights.tasks import make_task, on_meta
from benchmarks.weights.training import Outcome, Run, Steps, train
from benchmarks.weights.ways import PLAIN, WAYS
from benchmarks.weights.window import frozen
from lmswap.ir.bytesize import format_bytes

_PRELOAD = ("benchmarks.weights.training", "lmswap.api", "torch._dynamo", "scipy.optimize")
_MAX_TRIALS = 4  # to find the fewest blocks that fit
_TRIAL_STEPS = Steps(2, 1, 0)
_OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass(frozen=True)
class Choice:
    """What to run, and within which limits: ``budget_bytes``, or ``share`` of plain torch's need.

    ``copy_share`` sets the rate of copies in: a step's copies of what exceeds the budget take this share of plain
    torch's step. None: the machine's own rate.
    """

    ways: Sequence[str]
    size: str
    device: str
    share: float
    budget_bytes: int | None
    copy_share: float | None
    steps: Steps


def run_task(choice: Choice, name: str, tokens: int | None = None, known: Sequence[Outcome] = ()) -> Iterator[Outcome]:
    """Run a task in all chosen ways, after plain torch alone, whose peak and seconds set the limits.

    Args:
        choice: the ways and limits.
        name: of the task.
        tokens: of a decoder's sequences; None: the size's.
        known: what an earlier call has yielded before it was ended, on a GPU.

    Yields:
        The outcome of each way, plain torch twice among them; what does not fit or breaks is an outcome too.
    """
    plain = Run(name, choice.size, tokens, PLAIN, choice.device, steps=choice.steps)
    is_gpu, left = choice.device == "cuda", list(known)
    alone = left.pop(0) if left else run_in_turns([plain if is_gpu else replace(plain, steps=Steps(2, 0, 3))])[0]
    if alone.peak_bytes is None:
        yield alone
        return
    limited = [replace(_limited(choice, alone), way=way) for way in choice.ways]
    if is_gpu:  # it is used by one process at a time
        yield alone
        for run in (plain, *limited):
            if left:
                yield left.pop(0)
            elif WAYS[run.way].moves_blocks:
                yield _with_fewest_blocks(run, alone.peak_bytes)
            else:
                yield from run_in_turns([run])
        return
    runs = [plain, plain]
    for run in limited:
        if WAYS[run.way].moves_blocks:
            tried = _with_fewest_blocks(run, alone.peak_bytes)
            if tried.status != "ran":
                yield tried
                continue
            runs.append(replace(tried.run, steps=choice.steps))
        else:
            runs.append(run)
    yield from run_in_turns(runs)


def _limited(choice: Choice, plain: Outcome) -> Run:
    """A run within the budget, at the rate of copies that ``plain`` gives."""
    assert plain.peak_bytes is not None
    budget_bytes = choice.budget_bytes or int(choice.share * plain.peak_bytes)
    rate = None
    if choice.copy_share is not None:
        visits = make_task(plain.run.task, choice.size, plain.run.tokens).num_visits
        excess_bytes = visits * max(0, plain.peak_bytes - budget_bytes)
        rate = excess_bytes / (choice.copy_share * statistics.median(plain.seconds))
    return replace(plain.run, budget_bytes=budget_bytes, bytes_per_second=rate, steps=choice.steps)


def _with_fewest_blocks(run: Run, plain_bytes: int) -> Outcome:
    """How ``run`` ended with the fewest blocks with which it keeps the budget, by trials; else how the last one ended.

    Peaks fall by a block's bytes with each block, once two slots are paid for. On a CPU trials are short. On a GPU,
    where a model takes long to make, they are whole runs, and the first that fits is taken.
    """
    assert run.budget_bytes is not None
    on_cpu, blocks = run.device == "cpu", block_bytes(run)
    mean_bytes, num_blocks = statistics.mean(blocks), len(blocks)
    count = math.ceil((plain_bytes - run.budget_bytes) / mean_bytes) + 2
    fitting: Outcome | None = None
    for _ in range(_MAX_TRIALS):
        count = max(1, min(count, num_blocks))
        tried = replace(run, num_blocks=count, steps=_TRIAL_STEPS if on_cpu else run.steps)
        (outcome,) = run_in_turns([tried])
        if outcome.peak_bytes is not None:
            over_bytes = outcome.peak_bytes - run.budget_bytes
        elif _OUT_OF_MEMORY in outcome.detail:
            over_bytes = 1
        else:
            return outcome
        if over_bytes <= 0:
            fitting = outcome
            fewer = math.floor(-over_bytes / mean_bytes)
            if fewer == 0 or not on_cpu:
                return fitting
            count -= fewer
        elif fitting is not None:
            return fitting
        elif count == num_blocks:
            how = f"the peak is {format_bytes(outcome.peak_bytes)}" if outcome.peak_bytes else outcome.detail[:200]
            detail = f"with all {count} blocks moved {how}"
            return replace(outcome, status="infeasible", detail=detail)
        else:
            count += math.ceil(over_bytes / mean_bytes)
    return fitting or replace(outcome, status="infeasible", detail=f"no number of blocks found in {_MAX_TRIALS} trials")


def block_bytes(run: Run) -> list[int]:
    """Bytes of the frozen weights of each block of a run's model."""
    blocks: Sequence[nn.Module] = make_task(run.task, run.size, run.tokens).blocks(on_meta(run.task, run.size))
    return [sum(weight.nbytes for weight in frozen(block)) for block in blocks]


def run_in_turns(runs: Sequence[Run], train: Callable[[Run, Callable[[], None]], Outcome] = train) -> list[Outcome]:
    """Run ``runs`` in turns, see `train_in_turns`."""
    return train_in_turns(train, runs, lambda run, why: Outcome(run, "failed", why), preload=_PRELOAD)
