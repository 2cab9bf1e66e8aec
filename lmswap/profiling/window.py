"""The steps to be profiled, and counters of steps and epochs that need no change in a script.

A step ends when the optimizer's step ends (the first optimizer seen counts; a second one, as in a GAN, does not), and
begins where the previous one ended. An epoch begins when a new iteration over a DataLoader makes steps: validation
makes none. Without a DataLoader there is one epoch, unless its number of steps is given.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmswap.errors import OptionError, WindowError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Window:
    """Steps [first, stop) of all, or of one ``epoch``; steps count from 0, epochs from 1.

    The default starts after lmswap's last replanning, which follows the third step.
    """

    first: int = 5
    stop: int = 10
    epoch: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1 or self.stop <= self.first:
            raise OptionError(
                f"steps {self.first}:{self.stop} cannot be profiled: the first must be at least 1, since a step begins "
                "where the one before it ended, and the second larger than the first"
            )
        if self.epoch is not None and self.epoch < 1:
            raise OptionError(f"epoch {self.epoch} cannot be profiled: epochs count from 1")
        if self.epoch is None and self.steps_per_epoch is not None:
            raise OptionError("--steps-per-epoch is for steps of one epoch: say which with --epoch")
        if self.steps_per_epoch is not None and self.steps_per_epoch < self.stop:
            raise OptionError(
                f"steps {self.first}:{self.stop} need an epoch of at least {self.stop} steps, "
                f"--steps-per-epoch says {self.steps_per_epoch}"
            )

    @staticmethod
    def parse(steps: str | None, epoch: int | None = None, steps_per_epoch: int | None = None) -> Window:
        """Parse "20:50", the steps 20 to 49; None stands for the default.

        Raises:
            OptionError: not two numbers, or no such window.
        """
        first, stop = parse_steps(steps) if steps is not None else (Window.first, Window.stop)
        return Window(first, stop, epoch, steps_per_epoch)

    def error_for(self, epochs: list[int]) -> WindowError:
        """Return the error for a script without these steps; ``epochs``: the number of steps of each of its epochs."""
        had = ", ".join(f"epoch {number} had {steps} steps" for number, steps in enumerate(epochs, start=1))
        options = "--steps" if self.epoch is None else "--steps and --epoch"
        if self.epoch is None and epochs:
            had = f"it had {sum(epochs)}"
        return WindowError(
            f"the script did not have all {self}: {had or 'no optimizer made a step in it'}. Choose others with "
            + options
            + ("" if self.epoch is None or self.steps_per_epoch else ", or say --steps-per-epoch")
        )

    def index(self, epoch: int, step: int, number: int) -> int | None:
        """Return this window's index of step ``number``, which is ``step`` of ``epoch``; None outside its epoch."""
        if self.epoch is None:
            return number
        return step if epoch == self.epoch else None

    def is_past(self, epoch: int) -> bool:
        """Return whether ``epoch`` is after this window's."""
        return self.epoch is not None and epoch > self.epoch

    def __str__(self) -> str:
        return f"steps {self.first} to {self.stop - 1}" + (f" of epoch {self.epoch}" if self.epoch is not None else "")


def parse_steps(text: str) -> tuple[int, int]:
    """Parse "20:50" as (20, 50).

    Raises:
        OptionError: not two whole numbers.
    """
    first, _, stop = text.partition(":")
    try:
        return int(first), int(stop)
    except ValueError:
        raise OptionError(f"steps {text!r} are not FIRST:STOP, such as 20:50 for the steps 20 to 49") from None


class StepCounter:
    """Calls ``step_ended`` with (epoch, step in the epoch, step of all) after each training step until closed.

    Before that it calls ``optimizer_ran`` with each optimizer's name and the start and end of its step in seconds.
    Neither may close the counter: torch iterates over its hooks meanwhile.
    """

    def __init__(
        self,
        step_ended: Callable[[int, int, int], None],
        optimizer_ran: Callable[[str, float, float], None],
        steps_per_epoch: int | None = None,
    ) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._step_ended, self._optimizer_ran = step_ended, optimizer_ran
        self._steps_per_epoch = steps_per_epoch
        self._loading = _LoaderTracker()
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._iteration: int | None = None  # of a DataLoader, in which the last step was made
        self._num_steps = 0
        self.epochs: list[int] = []  # steps of each epoch so far
        self._optimizer_began = time.perf_counter()
        self._handles = (
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        )

    def close(self) -> None:
        """Stop counting. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._loading.close()

    def _optimizer_begins(self, *_: Any) -> None:
        self._optimizer_began = time.perf_counter()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer_ran(type(optimizer).__name__, self._optimizer_began, time.perf_counter())
        if self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        if self._is_new_epoch():
            self.epochs.append(0)
        self.epochs[-1] += 1
        self._iteration = self._loading.iteration
        self._num_steps += 1
        self._step_ended(len(self.epochs), self.epochs[-1] - 1, self._num_steps - 1)

    def _is_new_epoch(self) -> bool:
        if self._steps_per_epoch is not None:
            return self._num_steps % self._steps_per_epoch == 0
        return not self.epochs or self._iteration != self._loading.iteration


class _LoaderTracker:
    """Tracks the DataLoader iteration of the last batch, by a hook in torch's iterator."""

    def __init__(self) -> None:
        from lmswap.torch_compat.data_loaders import LoaderIterator, num_yielded

        self._iterator_class = LoaderIterator
        self._next = self._iterator_class.__next__
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_iterations = 0
        self.iteration: int | None = None

        @functools.wraps(self._next)
        def watched(iterator: Any) -> Any:
            if num_yielded(iterator) == 0:  # also when persistent workers reuse the iterator
                self._num_iterations += 1
                self._numbers[iterator] = self._num_iterations
            self.iteration = self._numbers.get(iterator)
            return self._next(iterator)

        self._iterator_class.__next__ = watched  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        self._iterator_class.__next__ = self._next  # type: ignore[method-assign]
