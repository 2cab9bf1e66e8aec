"""How are trainings compared where the speed changes? Step by step in turn, so that all see the same minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Training(Protocol):
    """One that has warmed up in a process of its own, and waits there."""

    @property
    def has_ended(self) -> bool:
        """It has finished, or died."""

    def take_turn(self) -> None:
        """Lets it take a step, and waits for that; nothing if it has ended."""


def take_turns(trainings: Sequence[Training]) -> None:
    """Lets each take one step after the other until all have ended; one computes at a time."""
    while not all(training.has_ended for training in trainings):
        for training in trainings:
            training.take_turn()
