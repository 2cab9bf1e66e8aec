"""Memory of the caller's code between a forward and the next segment: assumed at first, then measured.

That code computes the loss and starts its backward; where a graph break cut the model, it is the code between the
graphs. Programs represent it by an op of its own, with that memory as scratch bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import LOSS, BufferKind, Program

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


class LossMeter:
    """Measures, once per graph, from the end of its first forward to the start of the next segment."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._last_forward: int | None = None  # the graph whose forward ran last
        self._held_bytes = 0
        self._measured_bytes: dict[int, int] = {}  # by graph: above what was held when its forward had run

    def before_segment(self, graph: int, phase: str) -> None:
        """Note that a segment is about to run; a second forward of the same graph shows that there was no loss."""
        if self._last_forward is not None and (phase == "backward" or graph != self._last_forward):
            self._measured_bytes[self._last_forward] = max(0, self._memory.peak_tensor_bytes() - self._held_bytes)
        self._last_forward = None

    def after_segment(self, graph: int, phase: str) -> None:
        """Note that the segment has run."""
        if phase == "forward" and graph not in self._measured_bytes:
            self._last_forward, self._held_bytes = graph, self._memory.used_tensor_bytes()
            self._memory.reset_tensor_peak()

    def with_measured(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """Return ``costs`` of a step of ``graphs`` with the measured bytes of its losses, where there are any."""
        ops = _loss_ops(program, graphs)
        return costs.with_scratch(
            {op: self._measured_bytes[graph] for graph, op in ops if graph in self._measured_bytes}
        )

    def without_assumed(self, costs: OpCosts, program: Program, graphs: Sequence[int]) -> OpCosts:
        """Return ``costs`` of a step of ``graphs`` in which losses not yet measured take nothing."""
        ops = _loss_ops(program, graphs)
        return costs.with_scratch({op: 0 for graph, op in ops if graph not in self._measured_bytes})


def loss_bytes(costs: OpCosts, program: Program) -> int:
    """Return the bytes of the step's largest loss."""
    return max((costs.scratch_bytes[op.index] for op in program.ops if op.target == LOSS), default=0)


def without_losses(costs: OpCosts, program: Program) -> OpCosts:
    """Return ``costs`` of a step whose losses use memory that is counted elsewhere."""
    return costs.with_scratch({op.index: 0 for op in program.ops if op.target == LOSS})


def _loss_ops(program: Program, graphs: Sequence[int]) -> list[tuple[int, int]]:
    """Return graph and index of each op that represents a loss; ``graphs`` are the step's, in forward order."""
    return [(graphs[program.segment_of(op.index).graph], op.index) for op in program.ops if op.target == LOSS]


def _is_tangent(program: Program, buffer: int) -> bool:
    return program.buffers[buffer].kind is BufferKind.TANGENT
