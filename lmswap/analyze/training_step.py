"""The whole training step: the program of one micro-batch + optimizer → a cyclic program whose weights plans place.

Parameters become weights. Gradients are summed over the micro-batches, and updates follow: each op updates a parameter
chunk, with the optimizer's state of it. The step ends as it began, so that it can be repeated.

Nothing that a micro-batch returns is kept beyond its last use there: the loop adds up losses, not outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from lmswap.errors import OptionError
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment, Value

# Bounds on what one op updates, parameters, gradients and state: bytes, and a share of those of all. The share bounds
# the least budget of a small model, the bytes the number of ops of a large one.
CHUNK_BYTES, CHUNK_SHARE = 2**28, 1 / 32
# By element, of the copy in full precision that a parameter of fewer than four bytes has besides an optimizer's state.
_MASTER_BYTES = 4


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps for each element of a parameter, and its work there."""

    name: str
    state_bytes: int
    flops: int = 12


OPTIMIZERS = {
    found.name: found
    for found in (
        Optimizer("sgd", 0, flops=2),
        Optimizer("momentum", 4, flops=4),
        Optimizer("adam", 8),
        Optimizer("adamw", 8),
    )
}


def optimizer_called(name: str) -> Optimizer:
    """The optimizer of that name, of `OPTIMIZERS`.

    Raises:
        OptionError: there is none.
    """
    if name not in OPTIMIZERS:
        raise OptionError(f"unknown optimizer {name!r}; known are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def training_step(
    program: Program, optimizer: Optimizer | None = None, *, micro_batches: int = 1, clip_norm: bool = False
) -> Program:
    """The cyclic program of one optimizer step. Its budget counts everything but the model's buffers from zero.

    Args:
        program: forward and backward of one micro-batch, or a forward alone; parameters that have no gradient in
            ``gradients`` are frozen.
        optimizer: None where no parameter is trained.
        micro_batches: whose gradients are summed.
        clip_norm: gradients are clipped by their norm: every update needs all of them. Otherwise a chunk is updated in
            the last backward, once its gradients are final and nothing reads its weights again.

    Raises:
        OptionError: no optimizer for trained parameters, or ``micro_batches`` is not positive.
    """
    if micro_batches < 1:
        raise OptionError(f"micro_batches must be at least 1, not {micro_batches}")
    if program.gradients and optimizer is None:
        raise OptionError(f"{len(program.gradients)} parameters are trained, and there is no optimizer")
    return _Step(program, optimizer).build(micro_batches, clip_norm=clip_norm)


class _Step:
    def __init__(self, program: Program, optimizer: Optimizer | None) -> None:
        self._program, self._optimizer = program, optimizer
        self._parameter_of = {gradient: parameter for parameter, gradient in program.gradients}
        self._scratch_bytes: list[int] = []
        self._names, self._value_of = program.buffer_names, {v.buffer: v for v in reversed(program.values)}
        self._buffers: list[Buffer] = []
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._segments: list[Segment] = []
        self._weights = {
            buffer.id: self._new(buffer.nbytes, BufferKind.WEIGHT, self._names[buffer.id], buffer.id)
            for buffer in program.buffers
            if buffer.kind is BufferKind.PARAMETER
        }
        self._summed = {
            gradient: self._new(
                program.buffers[gradient].nbytes,
                BufferKind.SUMMED_GRADIENT,
                f"{self._names[parameter]}.grad",
                gradient,
            )
            for gradient, parameter in self._parameter_of.items()
        }
        self._states = {parameter: self._state_of(parameter) for parameter in self._parameter_of.values()}

    def _state_of(self, parameter: int) -> int | None:
        assert self._optimizer is not None
        nbytes, count = self._program.buffers[parameter].nbytes, self._elements(parameter)
        each = self._optimizer.state_bytes + (_MASTER_BYTES if nbytes < 4 * count else 0)
        name = f"{self._optimizer.name} of {self._names[parameter]}"
        return self._new(each * count, BufferKind.OPTIMIZER_STATE, name) if each else None

    def _elements(self, buffer: int) -> int:
        value = self._value_of.get(buffer)
        return math.prod(value.shape) if value is not None else self._program.buffers[buffer].nbytes // 4

    def _new(self, nbytes: int, kind: BufferKind, name: str, like: int | None = None) -> int:
        made = len(self._buffers)
        self._buffers.append(Buffer(made, nbytes, kind, name))
        value = self._value_of.get(like) if like is not None else None
        if value is not None:
            self._values.append(replace(value, id=len(self._values), name=name, buffer=made))
        return made

    def build(self, micro_batches: int, *, clip_norm: bool) -> Program:
        chunks = [*self._chunks()]
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            self._add_micro_batch(number, {} if clip_norm or not is_last else self._early(chunks))
        graph = 1 + max((segment.graph for segment in self._segments), default=0)
        if self._parameter_of and clip_norm:
            self._add_segment(graph, "update", [(op, 0) for op in (*self._norms(), *map(self._update, chunks))])
        fixed = self._program.fixed
        return Program(
            f"{self._program.name}, {micro_batches} micro-batches" if micro_batches > 1 else self._program.name,
            tuple(self._ops),
            tuple(self._buffers),
            tuple(self._values),
            tuple(self._segments),
            fixed and FixedMemory(before_bytes=max(0, fixed.before_bytes - fixed.parameter_bytes)),
            tuple(self._scratch_bytes),
        )

    def _add_segment(self, graph: int, phase: str, ops: Iterable[tuple[Op, int]]) -> None:
        """``ops`` are with their scratch bytes."""
        start = len(self._ops)
        for op, scratch_bytes in ops:
            self._ops.append(replace(op, index=len(self._ops)))
            self._scratch_bytes.append(scratch_bytes)
        self._segments.append(Segment(graph, phase, start, len(self._ops)))

    def _add_micro_batch(self, number: int, updates: Mapping[int, list[list[int]]]) -> None:
        """``updates`` are the chunks to update by the op that they follow."""
        program = self._program
        scratch_bytes = program.scratch_bytes or (0,) * len(program.ops)
        num_graphs = 1 + max(segment.graph for segment in program.segments)
        here = self._weights | (self._summed if number == 0 else {})
        for buffer in program.buffers:
            if buffer.id not in here:
                is_own = buffer.kind not in (BufferKind.INPUT, BufferKind.TANGENT)
                kind = BufferKind.ACTIVATION if is_own else buffer.kind
                here[buffer.id] = self._new(buffer.nbytes, kind, self._names[buffer.id], buffer.id)
        for segment in program.segments:
            ops: list[tuple[Op, int]] = []
            for op in program.ops[segment.start : segment.stop]:
                reads, writes = (tuple(here[buffer] for buffer in part) for part in (op.reads, op.writes))
                ops.append((replace(op, reads=reads, writes=writes), scratch_bytes[op.index]))
                ops += ((self._sum(here[b], self._summed[b]), 0) for b in op.writes if number and b in self._summed)
                ops += ((self._update(chunk), 0) for chunk in updates.get(op.index, ()))
            self._add_segment(num_graphs * number + segment.graph, segment.phase, ops)

    def _sum(self, made: int, summed: int) -> Op:
        name = self._buffers[summed].name
        return Op(0, f"sum {name}", "aten.add_", "", (made, summed), (summed,), is_repeatable=False)

    def _early(self, chunks: Iterable[list[int]]) -> dict[int, list[list[int]]]:
        last_use: dict[int, int] = {}
        for op in self._program.ops:
            last_use.update(dict.fromkeys((*op.reads, *op.writes), op.index))
        found: dict[int, list[list[int]]] = {}
        for chunk in chunks:
            touched = [buffer for gradient in chunk for buffer in (gradient, self._parameter_of[gradient])]
            after = max(last_use[buffer] for buffer in touched if buffer in last_use)
            found.setdefault(after, []).append(chunk)
        return found

    def _chunks(self) -> Iterator[list[int]]:
        """Yield gradients of consecutive parameters, in the order in which the backward makes them final."""
        max_bytes = min(CHUNK_BYTES, CHUNK_SHARE * sum(buffer.nbytes for buffer in self._buffers if buffer.is_shared))
        made = {buffer: op.index for op in self._program.ops for buffer in op.writes if buffer in self._parameter_of}
        chunk: list[int] = []
        held = 0
        for gradient in sorted(made, key=lambda gradient: made[gradient]):
            nbytes = sum(self._buffers[buffer].nbytes for buffer in self._updated([gradient]))
            if chunk and held + nbytes > max_bytes:
                yield chunk
                chunk, held = [], 0
            chunk.append(gradient)
            held += nbytes
        if chunk:
            yield chunk

    def _updated(self, chunk: Iterable[int]) -> Iterator[int]:
        for gradient in chunk:
            parameter = self._parameter_of[gradient]
            yield self._summed[gradient]
            yield self._weights[parameter]
            if (state := self._states[parameter]) is not None:
                yield state

    def _update(self, chunk: list[int]) -> Op:
        assert self._optimizer is not None
        touched = tuple(self._updated(chunk))
        flops = self._optimizer.flops * sum(self._elements(self._parameter_of[gradient]) for gradient in chunk)
        written = tuple(b for b in touched if self._buffers[b].is_persistent)
        name = f"{self._optimizer.name} of {len(chunk)} from {self._buffers[touched[0]].name}"
        return Op(0, name, f"lmswap.{self._optimizer.name}", "", touched, written, flops, is_repeatable=False)

    def _norms(self) -> Iterator[Op]:
        for summed in self._summed.values():
            name = f"norm of {self._buffers[summed].name}"
            made = self._new(4, BufferKind.ACTIVATION, name)
            yield Op(0, name, "aten.linalg_vector_norm", "", (summed,), (made,))
