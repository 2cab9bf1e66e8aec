"""The ops of one step in schedule order, and the buffers they read and write.

Time in a Program is the index of an op in ``ops``; a *position* ``p`` means "just before op p", so positions run from
0 to ``len(ops)``. All intervals are half-open.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING

from lmswap.errors import CaptureError
from lmswap.ir.fixed_memory import MAX_BYTES, FixedMemory
from lmswap.ir.json_io import as_json, fields_of, from_fields, read_record
from lmswap.terminal import escape_controls

if TYPE_CHECKING:
    import networkx

SCHEMA = "lmswap.program/3"
# The target of the op that ends a forward segment: the caller's code, up to the segment that runs next. It names no
# buffer; its memory is scratch.
LOSS = "lmswap.loss"
_OPTIONAL = ("fixed", "scratch_bytes", "gradients")  # fields that files leave out where nothing is known
PHASES = ("forward", "backward", "inference", "update")
# More than any machine computes in a step; sums over any program stay exact in 64 bits.
_MAX_FLOPS = 2**62


class BufferKind(StrEnum):
    """Who owns a buffer's memory, which decides how long it lives and whether it can be swapped."""

    PARAMETER = "parameter"  # the model's own, and constants: resident for good
    INPUT = "input"  # module buffers and what the caller passes in: held for the whole step; the caller may write it
    OUTPUT = "output"  # shares storage with a value returned to the caller: lives to the end of the step
    TANGENT = "tangent"  # gradient passed to a backward segment: lives from its start
    GRADIENT = "gradient"  # returned by a backward segment: lives to the end of the step
    ACCUMULATED_GRADIENT = "added"  # a gradient that is yielded when computed and added to the caller's
    ACTIVATION = "activation"  # made and last used inside the step: can be swapped from a forward to its backward
    WEIGHT = "weight"  # a parameter that the plan places: exists from step to step, any segment uses it
    OPTIMIZER_STATE = "optimizer_state"  # of a weight: exists from step to step, updates read and write it
    SUMMED_GRADIENT = "summed_gradient"  # of a weight: made by the first backward, last used by the update


_PERSISTENT = (BufferKind.WEIGHT, BufferKind.OPTIMIZER_STATE)
# Kinds whose buffers every segment can use; only a program of a whole step has them.
SHARED_KINDS = (BufferKind.WEIGHT, BufferKind.SUMMED_GRADIENT, BufferKind.OPTIMIZER_STATE)
_GRADIENTS = (BufferKind.GRADIENT, BufferKind.ACCUMULATED_GRADIENT)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A storage, shared by all the values that alias it: the unit that occupies memory and is swapped."""

    id: int
    nbytes: int
    kind: BufferKind
    name: str = ""  # of a parameter, "encoder.0.weight"; else what makes it, "encoder.0.conv: convolution"; or unknown

    def __post_init__(self) -> None:
        if not 0 <= self.nbytes <= MAX_BYTES:
            raise CaptureError(f"buffer {self.id} cannot have {self.nbytes} bytes")

    @property
    def is_resident(self) -> bool:
        """Whether it lives outside the step; such bytes are not part of the step's memory curve."""
        return self.kind in (BufferKind.PARAMETER, BufferKind.INPUT)

    @property
    def is_swappable(self) -> bool:
        """Whether only the plan's step sees its memory, so that the plan may move it."""
        return self.kind is BufferKind.ACTIVATION or self.is_shared

    @property
    def is_gradient(self) -> bool:
        """Whether a backward segment returns it as the gradient of a parameter."""
        return self.kind in _GRADIENTS

    @property
    def is_persistent(self) -> bool:
        """Whether it exists from step to step: the gap after its last use ends at its first use in the next step."""
        return self.kind in _PERSISTENT

    @property
    def is_shared(self) -> bool:
        """Whether every segment can use it: it is not a value that one segment passes to another."""
        return self.kind in SHARED_KINDS


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph: one view of a buffer. Sizes, strides and offset are in elements."""

    id: int
    name: str  # of the graph's node, for messages; identity is the id
    buffer: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Op:
    """One executed node. ``reads`` and ``writes`` are buffer ids; a view only reads."""

    index: int
    name: str
    target: str  # the operator, e.g. "aten.convolution.default"
    source: str  # the user's source line, "unet.py:88 y = self.conv(x)", or "" where the tracer kept none
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int = 0
    is_view: bool = False  # makes another view of a buffer; touches no bytes
    is_repeatable: bool = True  # a recompute in the same step is bitwise identical; random ops use a saved RNG state
    module: str = ""  # dotted path of the innermost module it belongs to, "" for the model itself or where unknown

    def __post_init__(self) -> None:
        if not 0 <= self.flops <= _MAX_FLOPS:
            raise CaptureError(f"op {self.index} '{self.name}' cannot have {self.flops} flops")

    @property
    def title(self) -> str:
        """Its name and the user's source line, for messages: "'conv' (unet.py:88 y = self.conv(x))"."""
        return f"'{self.name}'" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of ops that one compiled function executes: ops [start, stop) of the program."""

    graph: int  # index of the captured graph; graph breaks make several
    phase: str  # one of PHASES
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise CaptureError(f"segment of graph {self.graph} is '{self.phase}', none of {', '.join(PHASES)}")

    def can_pass_values_to(self, other: Segment) -> bool:
        """Whether ``other`` can read this segment's values: it is the same one, or the backward of its graph."""
        crosses = (self.phase, other.phase) == ("forward", "backward") and self.graph == other.graph
        return self == other or crosses


@dataclass(frozen=True, repr=False)
class Program:
    """One step: forward segments, then backward segments in reverse order of graphs."""

    name: str
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    values: tuple[Value, ...]
    segments: tuple[Segment, ...]
    fixed: FixedMemory | None = None  # what else its budget counts, where that is known
    scratch_bytes: tuple[int, ...] = ()  # by op, as measured; empty where nothing was
    # Pairs of buffers, a parameter and the gradient that a backward returns of it: other parameters are frozen.
    gradients: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        ids = {"buffer": [buffer.id for buffer in self.buffers], "value": [value.id for value in self.values]}
        for what, found in ids.items():
            if found != list(range(len(found))):
                raise CaptureError(f"{what} ids must count from 0 in order")
        for position, op in enumerate(self.ops):
            if op.index != position:
                raise CaptureError(f"op '{op.name}' has index {op.index} at position {position}")
            for buffer in (*op.reads, *op.writes):
                if not 0 <= buffer < len(self.buffers):
                    raise CaptureError(f"op '{op.name}' names buffer {buffer}, but there are {len(self.buffers)}")
        boundary = 0
        for segment in self.segments:
            if segment.start != boundary or segment.stop < segment.start:
                raise CaptureError(f"segment {segment} does not begin where the one before it ends ({boundary})")
            boundary = segment.stop
        if boundary != len(self.ops):
            raise CaptureError(f"segments cover {boundary} of {len(self.ops)} ops")
        self._check_optional()
        for value in self.values:
            if not 0 <= value.buffer < len(self.buffers):
                raise CaptureError(f"value '{value.name}' names buffer {value.buffer} of {len(self.buffers)}")

    def _check_optional(self) -> None:
        for pair in self.gradients:
            if not all(0 <= buffer < len(self.buffers) for buffer in pair):
                raise CaptureError(f"gradients name buffers {pair} of {len(self.buffers)}")
        if self.scratch_bytes and len(self.scratch_bytes) != len(self.ops):
            raise CaptureError(f"scratch of {len(self.scratch_bytes)} ops, but there are {len(self.ops)}")
        if not all(0 <= nbytes <= MAX_BYTES for nbytes in self.scratch_bytes):
            raise CaptureError("scratch of an op is less than nothing, or more than any machine has")

    def segment_of(self, index: int) -> Segment:
        """The segment that executes op ``index``."""
        for segment in self.segments:
            if segment.start <= index < segment.stop:
                return segment
        raise IndexError(f"op {index} of {len(self.ops)}")

    @cached_property
    def is_cyclic(self) -> bool:
        """Whether buffers persist from step to step, so that the step ends as it began."""
        return any(buffer.is_persistent for buffer in self.buffers)

    @cached_property
    def only_reads_weights(self) -> bool:
        """Whether no op writes a buffer that persists from step to step: host copies of weights stay valid."""
        return not any(self.buffers[buffer].is_persistent for op in self.ops for buffer in op.writes)

    @property
    def fixed_memory(self) -> FixedMemory:
        """What else its budget counts; nothing where that is not known."""
        return self.fixed or FixedMemory()

    def bytes_of(self, kind: BufferKind) -> int:
        """Total bytes of its buffers of ``kind``."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.kind is kind)

    @cached_property
    def gradient_bytes(self) -> int:
        """Total bytes of its gradients."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.is_gradient)

    @cached_property
    def kind_of_gradients(self) -> BufferKind | None:
        """The kind of its gradients, GRADIENT or ACCUMULATED_GRADIENT; None if it has none."""
        return next((buffer.kind for buffer in self.buffers if buffer.is_gradient), None)

    def with_gradients(self, kind: BufferKind) -> Program:
        """The step whose gradients are of ``kind``, GRADIENT or ACCUMULATED_GRADIENT."""
        buffers = (replace(buffer, kind=kind) if buffer.is_gradient else buffer for buffer in self.buffers)
        return replace(self, buffers=tuple(buffers))

    @cached_property
    def buffer_names(self) -> tuple[str, ...]:
        """Name of each buffer in messages: its own, or else its first value's; numbered where several share one."""
        names = [f"buffer {buffer.id}" for buffer in self.buffers]
        for value in reversed(self.values):
            names[value.buffer] = value.name
        counts: Counter[str] = Counter()
        for buffer in self.buffers:
            name = buffer.name or names[buffer.id]
            counts[name] += 1
            names[buffer.id] = name if counts[name] == 1 else f"{name} #{counts[name]}"
        return tuple(names)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """The data-flow graph: a node per op, an edge where an op reads what another wrote.

        Nodes are op indices and carry the Op's fields; the edge attribute ``buffers`` is the tuple of buffer ids that
        carry the dependency.
        """
        import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph(name=self.name)
        last_writer: dict[int, int] = {}
        for op in self.ops:
            graph.add_node(op.index, **{key: value for key, value in asdict(op).items() if key != "index"})
            for buffer in op.reads:
                writer = last_writer.get(buffer)
                if writer is None:
                    continue
                carried = graph.get_edge_data(writer, op.index, {"buffers": ()})["buffers"]
                if buffer not in carried:
                    graph.add_edge(writer, op.index, buffers=(*carried, buffer))
            for buffer in op.writes:
                last_writer[buffer] = op.index
        return graph

    def to_json(self) -> str:
        """The program as JSON text; `from_json` reads it back equal."""
        known = {name: found for name, found in fields_of(self).items() if found or name not in _OPTIONAL}
        return as_json({"schema": SCHEMA, **known})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON text: identifies the program."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str) -> Program:
        """Reads what `to_json` wrote.

        Raises:
            CaptureError: not JSON, of another schema, or inconsistent.
        """
        return read_record(text, SCHEMA, partial(from_fields, Program), "program file", CaptureError)

    def __repr__(self) -> str:
        size = f"{len(self.ops)} ops, {len(self.buffers)} buffers"
        return escape_controls(f"<program {self.name}: {size}; print it, or see its fields>")

    def __str__(self) -> str:
        lines = [f"program {self.name}: {len(self.ops)} ops, {len(self.buffers)} buffers"]
        for segment in self.segments:
            lines.append(f"{segment.phase} of graph {segment.graph}: ops [{segment.start}, {segment.stop})")
            for op in self.ops[segment.start : segment.stop]:
                made = " ".join(f"%{b}:{self.buffers[b].nbytes}" for b in op.writes) or "-"
                used = " ".join(f"%{b}" for b in op.reads)
                lines.append(f"  {op.index:>5} {made} = {op.target}({used})  {op.source}".rstrip())
        return escape_controls("\n".join(lines))
