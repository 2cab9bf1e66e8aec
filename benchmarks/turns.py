"""Compares trainings on a machine whose speed changes: they step in turn, so that all run in the same minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Training(Protocol):
    """A training that has warmed up in a process of its own and waits for its turn."""

    @property
    def has_ended(self) -> bool:
        """Whether it has finished or died."""

    def take_turn(self) -> None:
        """Run one step and wait for its end; nothing if it has ended."""


def take_turns(trainings: Sequence[Training]) -> None:
    """Run steps of all trainings in turn until all have ended; one computes at a time."""
    while not all(training.has_ended for training in trainings):
        for training in trainings:
            training.take_turn()
