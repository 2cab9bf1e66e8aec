"""Detects which outputs and tangents of a step the caller has dropped when the backward begins and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lmswap.ir.program import BufferKind, Program
from lmswap.runtime.codegen import SegmentGraph
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.tensors import free_weak_storage, is_expired, weak_storage

Positions = Mapping[int, int]  # position in a graph's results or arguments → buffer


def output_positions(graph: SegmentGraph, program: Program) -> Positions:
    """Return the positions of outputs in a forward's results, or of outputs and tangents in a backward's arguments."""
    kind, nodes = BufferKind.TANGENT, graph.inputs
    if graph.phase != "backward":
        kind, nodes = BufferKind.OUTPUT, graph.returned
    visible = {buffer.id for buffer in program.buffers if buffer.kind in (kind, BufferKind.OUTPUT)}
    buffers = {position: graph.buffer_of.get(node, -1) for position, node in enumerate(nodes)}
    return {position: buffer for position, buffer in buffers.items() if buffer in visible}


class OutputLiveness:
    """Tracks the storages of one graph's outputs and tangents during training, by weak references.

    Outputs are the caller's, who may drop them once the loss is computed. The caller of a backward may hold its
    tangents until it returns (torch 2.11), or transfer them (2.13).
    """

    def __init__(self) -> None:
        self._watched: dict[int, int] = {}  # by buffer: weak references
        self._dropped: frozenset[int] = frozenset()
        self._is_stopped = False
        self.released: frozenset[int] = frozenset()  # outputs dropped before backward began, others before it ended

    def take_released(self) -> frozenset[int]:
        """Return what was dropped; nothing is tracked from now on."""
        self._is_stopped = True
        self._forget()
        return self.released

    def after_forward(self, values: Sequence[Any], positions: Positions) -> None:
        """Track the results of the forward graph."""
        if not self._is_stopped:
            self._watch(values, positions)

    def before_backward(self, arguments: Sequence[Any], positions: Positions) -> None:
        """Note which outputs have been dropped, and track the arguments of the backward graph, about to be called."""
        if self._is_stopped:
            return
        self._dropped = self._expired()
        self._watch(arguments, positions)

    def after_backward(self) -> None:
        """Note which are dropped now that the backward graph has returned."""
        if not self._is_stopped:
            self.released = self._dropped | self._expired()

    def _watch(self, values: Sequence[Any], positions: Positions) -> None:
        found = {buffer: values[position] for position, buffer in positions.items()}
        self._forget()
        self._watched = {
            buffer: weak_storage(value.untyped_storage())
            for buffer, value in found.items()
            if isinstance(value, Tensor) and has_plain_storage(value)
        }

    def _expired(self) -> frozenset[int]:
        return frozenset(buffer for buffer, storage in self._watched.items() if is_expired(storage))

    def _forget(self) -> None:
        watched, self._watched = self._watched, {}
        for storage in watched.values():
            free_weak_storage(storage)

    def __del__(self) -> None:
        self._forget()
