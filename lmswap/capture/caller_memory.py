"""Memory of the caller's code between a forward and the next segment: assumed at first, then measured.

That code computes the loss and starts its backward; where a graph break cut the model, it is the code between the
graphs. Programs represent it by an op of its own, with that memory as scratch bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import LOSS, BufferKind, Op, Program

# Cross entropy holds its log-softmax, its gradient and the output's, all in fp32 also where the output is not.
_ASSUMED_TENSORS, _MIN_ITEM_BYTES = 3, 4


def assumed_bytes(program: Program) -> int:
    """Return the bytes assumed for a loss of a graph's outputs, before they are measured."""
    # The first value of each buffer: later ones may be expanded views of it.
    tangents = {value.buffer: value for value in reversed(program.values) if _is_tangent(program, value.buffer)}
    item_bytes = {buffer: getattr(torch, value.dtype).itemsize for buffer, value in tangents.items()}
    return sum(
        _ASSUMED_TENSORS * max(_MIN_ITEM_BYTES, item_bytes[buffer]) * math.prod(value.shape)
        for buffer, value in tangents.items()
    )


def tangent_bytes(program: Program, loss: Op) -> int:
    """Return the bytes that the backward gets from ``loss``, whose memory grows with the sizes of a step as they do."""
    graph = program.segment_of(loss.index).graph
    own = (program.ops[segment.start : segment.stop] for segment in program.segments if segment.graph == graph)
    read = {buffer for ops in own for op in ops for buffer in op.reads}
    return sum(program.buffers[buffer].nbytes for buffer in read if _is_tangent(program, buffer))


class _Measured(NamedTuple):
    nbytes: int  # above what was held when the forward had run
    tangent_bytes: int  # of what the backward got

    def bytes_for(self, tangent_bytes: int) -> int:
        """Return the bytes of the loss of a step whose backward gets ``tangent_bytes``."""
        return -(-self.nbytes * tangent_bytes // self.tangent_bytes) if self.tangent_bytes else self.nbytes


class _UnderWay(NamedTuple):
    graph: int  # whose forward ran last
    held_bytes: int  # when it had run
    program: Callable[[], Program]  # returns its graph's for the sizes of the run


class LossMeter:
    """Measures from the end of a graph's forward to the start of the next segment: of its first, and where watched."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._under_way: _UnderWay | None = None
        self._measured: dict[int, _Measured] = {}  # by graph: the most so far
        self._watched: set[int] = set()  # graphs whose losses are measured in each step
        self._settled: set[int] = set()  # measured, and not watched
        self.grown: set[int] = set()  # graphs of which more was measured than `with_measured` last knew
        self._alike: dict[int, int] = {}  # by graph: another one of the same trace

    def before_segment(self, graph: int, phase: str) -> None:
        """Note that a segment is about to run; a second forward of the same graph shows that there was no loss."""
        ran = self._under_way
        if ran is None:
            return
        self._under_way = None
        if phase != "backward" and graph == ran.graph:
            return
        nbytes, known = max(0, self._memory.peak_tensor_bytes() - ran.held_bytes), self._measured.get(ran.graph)
        if known is None or nbytes > known.nbytes:
            program = ran.program()
            of_losses = sum(tangent_bytes(program, op) for op in program.ops if op.target == LOSS)
            self._measured[ran.graph] = _Measured(nbytes, of_losses)
            self.grown.add(ran.graph)
        if ran.graph not in self._watched:
            self._settled.add(ran.graph)

    def after_segment(self, graph: int, phase: str, of_run: Callable[[], Program]) -> None:
        """Note that the segment has run; ``of_run`` returns its graph's program for the sizes of the run."""
        if phase == "forward" and graph not in self._settled:
            self._under_way = _UnderWay(graph, self._memory.used_tensor_bytes(), of_run)
            self._memory.reset_tensor_peak()

    def watch(self, graphs: Sequence[int]) -> None:
        """Measure the losses of ``graphs`` in each step from now on: a caller may come to make more."""
        self._watched.update(graphs)
        self._settled.difference_update(graphs)

    def expect_as(self, graph: int, other: int) -> None:
        """Expect the loss of ``graph``, until it is measured, to be that of ``other``, the same one for other sizes."""
        self._alike[graph] = other

    def forget(self, graph: int) -> None:
        """Forget ``graph``: another one may get its number."""
        self._alike.pop(graph, None)
        self._watched.discard(graph)

    def _known(self, graph: int) -> _Measured | None:
        return self._measured.get(graph) or self._measured.get(self._alike.get(graph, graph))

    def with_measured(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """Return ``costs`` of a step of ``graphs`` with the measured bytes of its losses, where there are any."""
        self.grown.difference_update(graphs)
        known = ((op, self._known(graph)) for graph, op in _loss_ops(program, graphs))
        return costs.with_scratch(
            {op.index: loss.bytes_for(tangent_bytes(program, op)) for op, loss in known if loss is not None}
        )

    def without_assumed(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """Return ``costs`` of a step of ``graphs`` in which losses not yet measured take nothing."""
        ops = _loss_ops(program, graphs)
        return costs.with_scratch({op.index: 0 for graph, op in ops if self._known(graph) is None})


def loss_bytes(costs: OpCosts, program: Program) -> int:
    """Return the bytes of the step's largest loss."""
    return max((costs.scratch_bytes[op.index] for op in program.ops if op.target == LOSS), default=0)


def without_losses(costs: OpCosts, program: Program) -> OpCosts:
    """Return ``costs`` of a step whose losses use memory that is counted elsewhere."""
    return costs.with_scratch({op.index: 0 for op in program.ops if op.target == LOSS})


def _loss_ops(program: Program, graphs: Sequence[int]) -> list[tuple[int, Op]]:
    """Return graph and op of each loss; ``graphs`` are the step's, in forward order."""
    return [(graphs[program.segment_of(op.index).graph], op) for op in program.ops if op.target == LOSS]


def _is_tangent(program: Program, buffer: int) -> bool:
    return program.buffers[buffer].kind is BufferKind.TANGENT
