"""Ways of a task within one budget, after plain torch alone, whose peak and seconds set the limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from benchmarks.weights.outcomes import PLAIN, Outcome, Run, Steps
from lmswap.ir.bytesize import format_bytes

Found = TypeVar("Found", bound=Outcome)

_MAX_TRIALS = 4  # to find the fewest blocks that fit
_TRIAL_STEPS = Steps(2, 1, 0)
_OUT_OF_MEMORY = "OutOfMemoryError"


class Way(Protocol):
    """A way of which the comparison knows whether it is given the number of blocks that it moves."""

    @property
    def moves_blocks(self) -> bool:
        """Whether it is; else it has the budget, or a peak of its own."""


@dataclass(frozen=True)
class Choice:
    """What to run, and within which limits: ``budget_bytes``, or ``share`` of plain torch's need.

    ``copy_share`` sets the rate of copies: a step's copies of what exceeds the budget take this share of plain torch's
    step. None: the machine's own rate.
    """

    ways: Sequence[str]
    size: str
    device: str
    share: float
    budget_bytes: int | None
    copy_share: float | None
    steps: Steps


@dataclass(frozen=True)
class Comparison(Generic[Found]):
    """What is compared.

    Args:
        ways: by name.
        copied_bytes: of plain torch's outcome and the bytes by which it exceeds the budget, those that a step copies.
        block_bytes: of each block of a run that can be moved.
        run_in_turns: runs on a CPU beside each other.
    """

    ways: Mapping[str, Way]
    copied_bytes: Callable[[Found, int], int]
    block_bytes: Callable[[Run], list[int]]
    run_in_turns: Callable[[Sequence[Run]], list[Found]]

    def run(self, choice: Choice, name: str, tokens: int | None, known: Sequence[Found]) -> Iterator[Found]:
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
        first = plain if is_gpu else replace(plain, steps=Steps(2, 0, 3))
        alone = left.pop(0) if left else self.run_in_turns([first])[0]
        if alone.peak_bytes is None:
            yield alone
            return
        limited = [replace(self._limited(choice, alone), way=way) for way in choice.ways]
        if is_gpu:  # it is used by one process at a time
            yield alone
            for run in (plain, *limited):
                if left:
                    yield left.pop(0)
                elif self.ways[run.way].moves_blocks:
                    yield self._with_fewest_blocks(run, alone.peak_bytes)
                else:
                    yield from self.run_in_turns([run])
            return
        runs = [plain, plain]
        for run in limited:
            if self.ways[run.way].moves_blocks:
                tried = self._with_fewest_blocks(run, alone.peak_bytes)
                if tried.status != "ran":
                    yield tried
                    continue
                runs.append(replace(tried.run, steps=choice.steps))
            else:
                runs.append(run)
        yield from self.run_in_turns(runs)

    def _limited(self, choice: Choice, plain: Found) -> Run:
        """A run within the budget, at the rate of copies that ``plain`` gives."""
        assert plain.peak_bytes is not None
        budget_bytes = choice.budget_bytes or int(choice.share * plain.peak_bytes)
        rate = None
        if choice.copy_share is not None:
            copied_bytes = self.copied_bytes(plain, max(0, plain.peak_bytes - budget_bytes))
            rate = copied_bytes / (choice.copy_share * statistics.median(plain.seconds))
        return replace(plain.run, budget_bytes=budget_bytes, bytes_per_second=rate, steps=choice.steps)

    def _with_fewest_blocks(self, run: Run, plain_bytes: int) -> Found:
        """How ``run`` ended with the fewest blocks that keep the budget, by trials; else how the last one ended.

        Peaks fall by a block's bytes with each block, once two slots are paid for. On a CPU trials are short. On a GPU,
        where a model takes long to make, they are whole runs, and the first that fits is taken.
        """
        assert run.budget_bytes is not None
        on_cpu, blocks = run.device == "cpu", self.block_bytes(run)
        mean_bytes, num_blocks = statistics.mean(blocks), len(blocks)
        count = math.ceil((plain_bytes - run.budget_bytes) / mean_bytes) + 2
        fitting: Found | None = None
        for _ in range(_MAX_TRIALS):
            count = max(1, min(count, num_blocks))
            tried = replace(run, num_blocks=count, steps=_TRIAL_STEPS if on_cpu else run.steps)
            (outcome,) = self.run_in_turns([tried])
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
        return fitting or replace(
            outcome, status="infeasible", detail=f"no number of blocks found in {_MAX_TRIALS} trials"
        )
