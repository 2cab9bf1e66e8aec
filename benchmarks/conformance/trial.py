"""A trial: a model with random weights and one call of it, or several of them in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and those by name


@dataclass(frozen=True)
class Trial:
    """Model and call are recreated for each training, from the same random state.

    Trials of one case that follow each other with the same ``group`` may be trained together, which saves captures.
    """

    make_model: Callable[[], nn.Module]
    make_call: Callable[[], Call]
    is_training: bool = True
    name: str = ""
    group: str = ""


def groups(trials: Iterator[Trial]) -> Iterator[list[Trial]]:
    """The trials that may be trained together; those without a group each alone."""
    for group, members in groupby(trials, lambda trial: trial.group):
        if group:
            yield list(members)
        else:
            yield from ([member] for member in members)


def together(trials: Sequence[Trial]) -> Trial:
    """A trial whose step consists of all of theirs, one after the other."""

    def make_call() -> Call:
        return tuple(trial.make_call() for trial in trials), {}

    return Trial(
        lambda: _Together([trial.make_model() for trial in trials]),
        make_call,
        trials[0].is_training,
        ", ".join(trial.name for trial in trials),
    )


class _Together(nn.Module):
    """Calls one model after the other."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *calls: Call) -> list[Any]:
        return [model(*args, **kwargs) for model, (args, kwargs) in zip(self.models, calls, strict=True)]
