"""Does anybody still hold what a graph handed out, or was handed? Outputs and tangents of a step → those let go of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmswap.execute.graph import SegmentGraph
from lmswap.execute.storage import has_plain_storage
from lmswap.ir.program import BufferKind, Program

_STORAGES: Any = torch.UntypedStorage  # its private methods have no type hints
Positions = Mapping[int, int]  # in what a graph returns or is called with → buffer


def handed_over(graph: SegmentGraph, program: Program) -> Positions:
    """Where outputs are in what a forward graph returns, and outputs and tangents in what a backward is called with."""
    kind, nodes = BufferKind.TANGENT, graph.module.graph.find_nodes(op="placeholder")
    if graph.phase != "backward":
        (output,) = graph.module.graph.find_nodes(op="output")
        kind, nodes = BufferKind.OUTPUT, output.args[0][: graph.num_user_outputs]
    handed = {buffer.id for buffer in program.buffers if buffer.kind in (kind, BufferKind.OUTPUT)}
    buffers = {position: graph.buffer_of.get(node, -1) for position, node in enumerate(nodes)}
    return {position: buffer for position, buffer in buffers.items() if buffer in handed}


class Handover:
    """Watches the memory of one graph's outputs and tangents while it trains, and holds none of it.

    Outputs are the caller's, who may drop them when the loss is known. Whoever calls a backward may hold its tangents
    until it returns (torch 2.11), or hand them over for good (2.13).
    """

    def __init__(self) -> None:
        # By buffer: torch's weak references to storages, as numbers. Its `StorageWeakRef` runs Python code when it is
        # dropped, in which the interrupt of a signal would be lost.
        self._watched: dict[int, int] = {}
        self._dropped: frozenset[int] = frozenset()
        self.released: frozenset[int] = frozenset()  # outputs gone when backward began, others when it had ended

    def ran_forward(self, values: Sequence[Any], positions: Positions) -> None:
        """The forward graph has returned ``values``."""
        self._watch(values, positions)

    def begins_backward(self, arguments: Sequence[Any], positions: Positions) -> None:
        """The backward graph is about to be called with ``arguments``."""
        self._dropped = self._expired()
        self._watch(arguments, positions)

    def ran_backward(self) -> None:
        """It has returned."""
        self.released = self._dropped | self._expired()

    def _watch(self, values: Sequence[Any], positions: Positions) -> None:
        found = {buffer: values[position] for position, buffer in positions.items()}
        self._forget()
        self._watched = {
            buffer: _STORAGES._weak_ref(value.untyped_storage())
            for buffer, value in found.items()
            if isinstance(value, Tensor) and has_plain_storage(value)
        }

    def _expired(self) -> frozenset[int]:
        return frozenset(buffer for buffer, storage in self._watched.items() if _STORAGES._expired(storage))

    def _forget(self) -> None:
        watched, self._watched = self._watched, {}
        for storage in watched.values():
            _STORAGES._free_weak_ref(storage)

    def __del__(self) -> None:
        self._forget()
