"""Does anybody still hold what a graph handed out, or was handed? Outputs and tangents of a step → those let go of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lmswap.execute.graph import SegmentGraph
from lmswap.execute.storage import has_plain_storage
from lmswap.ir.program import BufferKind, Program

_WeakStorage: Any = StorageWeakRef  # has no type hints
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
        self._watched: dict[int, Any] = {}  # by buffer
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
        self._watched = {
            buffer: _WeakStorage(value.untyped_storage())
            for buffer, value in found.items()
            if isinstance(value, Tensor) and has_plain_storage(value)
        }

    def _expired(self) -> frozenset[int]:
        return frozenset(buffer for buffer, storage in self._watched.items() if storage.expired())
