"""All ways of a task, each in a process of its own, on a CPU in turns → an outcome each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.state.moved import parts_of
from benchmarks.state.tasks import TASKS
from benchmarks.state.training import StateOutcome, train
from benchmarks.state.ways import WAYS
from benchmarks.turns import train_in_turns
from benchmarks.weights.comparison import Choice, Comparison
from benchmarks.weights.outcomes import Run
from benchmarks.weights.run import PRELOAD


def run_task(choice: Choice, name: str, known: Sequence[StateOutcome] = ()) -> Iterator[StateOutcome]:
    """Yield the outcomes of a task, see `Comparison.run`."""
    return Comparison(WAYS, copied_bytes, part_bytes, run_in_turns).run(choice, name, None, known)


def copied_bytes(plain: StateOutcome, excess_bytes: int) -> int:
    """Bytes that a step copies each way: state once, what exceeds it for each forward and backward."""
    num_visits = 2 * TASKS[plain.run.task][plain.run.size].micro_batches
    state_bytes = min(excess_bytes, plain.state_bytes)
    return state_bytes + num_visits * (excess_bytes - state_bytes)


def part_bytes(run: Run) -> list[int]:
    """Bytes of the state of each part of a run's parameters."""
    task = TASKS[run.task][run.size]
    trained = [parameter for parameter in task.on_meta().parameters() if parameter.requires_grad]
    return [task.num_values * sum(parameter.nbytes for parameter in part) for part in parts_of(trained)]


def run_in_turns(
    runs: Sequence[Run], train: Callable[[Run, Callable[[], None]], StateOutcome] = train
) -> list[StateOutcome]:
    """Run ``runs`` in turns, see `train_in_turns`."""
    preload = ("benchmarks.state.training", *PRELOAD)
    return train_in_turns(train, runs, lambda run, why: StateOutcome(run, "failed", why), preload=preload)
