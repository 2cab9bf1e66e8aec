"""Optimizer state that is elsewhere between updates, without overlap: what a user writes around ``optimizer.step``.

An update takes one part of the parameters after the other: its state is copied in, updated, and copied out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.weights.paced_file import PacedFile
from benchmarks.weights.window import spread

NUM_PARTS = 32


class Home(Protocol):
    """Where state is between updates."""

    def store(self, tensor: Tensor) -> Any:
        """Keep the bytes of ``tensor``; what is returned stands for them."""

    def write(self, stored: Any, source: Tensor) -> None:
        """Replace what is stored."""

    def read(self, stored: Any, target: Tensor) -> None:
        """Read what is stored into ``target``."""


class HostMemory:
    """Pinned memory."""

    def store(self, tensor: Tensor) -> Tensor:
        """See `Home`; so are the others."""
        return tensor.to("cpu").pin_memory()

    def write(self, stored: Tensor, source: Tensor) -> None:  # noqa: D102
        stored.copy_(source)

    def read(self, stored: Tensor, target: Tensor) -> None:  # noqa: D102
        target.copy_(stored)


class MovedState:
    """The state of an optimizer, in parts, some of which are moved."""

    def __init__(self, optimizer: Optimizer, num_moved: int, bytes_per_second: float | None) -> None:
        """Let `step` move ``num_moved`` of the parts: to a file at this rate, or to pinned memory."""
        self._optimizer = optimizer
        self._parts = parts_of([parameter for group in optimizer.param_groups for parameter in group["params"]])
        self._moved = {*spread(range(len(self._parts)), num_moved)}
        self._home: Home = HostMemory() if bytes_per_second is None else PacedFile(bytes_per_second)
        self._stored: dict[tuple[int, str], Any] = {}  # by `id` of the parameter and name of the state
        self.read_bytes = 0

    def step(self) -> None:
        """Update all parameters, part by part."""
        groups = [(group, group["params"]) for group in self._optimizer.param_groups]
        for number, part in enumerate(self._parts):
            chosen = {id(parameter) for parameter in part}
            self._fetch(part)
            for group, parameters in groups:
                group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
            self._optimizer.step()
            if number in self._moved:
                self._move_out(part)
        for group, parameters in groups:
            group["params"] = parameters

    def fetch_all(self) -> None:
        """Copy all state in."""
        for part in self._parts:
            self._fetch(part)

    def _fetch(self, part: Sequence[Tensor]) -> None:
        for parameter, name, tensor in self._states(part):
            stored = self._stored.get((id(parameter), name))
            if stored is not None and not tensor.numel():
                tensor.data = torch.empty(stored.shape, dtype=stored.dtype, device=tensor.device)
                self._home.read(stored, tensor)
                self.read_bytes += stored.nbytes

    def _move_out(self, part: Sequence[Tensor]) -> None:
        for parameter, name, tensor in self._states(part):
            key = id(parameter), name
            if key in self._stored:
                self._home.write(self._stored[key], tensor)
            else:
                self._stored[key] = self._home.store(tensor)
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def _states(self, part: Sequence[Tensor]) -> Iterator[tuple[Tensor, str, Tensor]]:
        for parameter in part:
            for name, value in self._optimizer.state[parameter].items():
                if isinstance(value, Tensor) and value.ndim:
                    yield parameter, name, value


def parts_of(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """At most `NUM_PARTS` consecutive parts of about the same bytes."""
    total_bytes, before_bytes = sum(parameter.nbytes for parameter in parameters), 0
    parts: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        parts.setdefault(before_bytes * NUM_PARTS // total_bytes, []).append(parameter)
        before_bytes += parameter.nbytes
    return [*parts.values()]
