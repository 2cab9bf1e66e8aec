"""All ways of a task, each in a process of its own, on a CPU in turns → an outcome each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from benchmarks.turns import train_in_turns
from benchmarks.weights.comparison import Choice, Comparison
from benchmarks.weights.outcomes import Outcome, Run
from benchmarks.weights.tasks import make_task, on_meta
from benchmarks.weights.training import train
from benchmarks.weights.ways import WAYS
from benchmarks.weights.window import frozen

PRELOAD = ("benchmarks.weights.training", "lmswap.api", "torch._dynamo", "scipy.optimize")


def run_task(choice: Choice, name: str, tokens: int | None = None, known: Sequence[Outcome] = ()) -> Iterator[Outcome]:
    """Yield the outcomes of a task, see `Comparison.run`."""
    return Comparison(WAYS, _copied_bytes, block_bytes, run_in_turns).run(choice, name, tokens, known)


def _copied_bytes(plain: Outcome, excess_bytes: int) -> int:
    return make_task(plain.run.task, plain.run.size, plain.run.tokens).num_visits * excess_bytes


def block_bytes(run: Run) -> list[int]:
    """Bytes of the frozen weights of each block of a run's model."""
    blocks: Sequence[nn.Module] = make_task(run.task, run.size, run.tokens).blocks(on_meta(run.task, run.size))
    return [sum(weight.nbytes for weight in frozen(block)) for block in blocks]


def run_in_turns(runs: Sequence[Run], train: Callable[[Run, Callable[[], None]], Outcome] = train) -> list[Outcome]:
    """Run ``runs`` in turns, see `train_in_turns`."""
    return train_in_turns(train, runs, lambda run, why: Outcome(run, "failed", why), preload=PRELOAD)
