"""Hypothesis strategies: random steps, machines and budgets that any planner must cope with."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from benchmarks.distributed.prediction.network import ALGORITHMS, Network
from lmswap.analyze.training_step import OPTIMIZERS, training_step
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Host, Link, Machine, Rate, Tier
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment, Value
from tests.ir.build import Step

SECONDS = st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0, 7.0])
SIZES = st.sampled_from([0, 1, 2, 3, 4, 7, 5000])


@st.composite
def steps(draw: st.DrawFn, *, max_ops: int = 14, max_graphs: int = 2) -> Step:
    """A step of one or two training graphs, or of an inference graph: skips, several uses, in-place writes, views."""
    maker = _Maker(draw)
    if draw(st.booleans()):
        graphs = draw(st.integers(1, max_graphs))
        saved = [maker.segment(graph, "forward", draw(st.integers(1, max_ops)), []) for graph in range(graphs)]
        for graph in reversed(range(graphs)):
            maker.segment(graph, "backward", draw(st.integers(1, max_ops)), saved[graph])
    else:
        maker.segment(0, "inference", draw(st.integers(1, max_ops)), [])
    return maker.step()


class _Maker:
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._buffers: list[Buffer] = []
        self._ops: list[Op] = []
        self._segments: list[Segment] = []
        self._weights = [self._buffer(BufferKind.PARAMETER) for _ in range(2)]

    def _buffer(self, kind: BufferKind) -> int:
        self._buffers.append(Buffer(len(self._buffers), self._draw(SIZES), kind))
        return len(self._buffers) - 1

    def segment(self, graph: int, phase: str, num_ops: int, saved: list[int]) -> list[int]:
        """Adds a segment that may read ``saved``; returns its activations."""
        draw, start = self._draw, len(self._ops)
        handed = BufferKind.TANGENT if phase == "backward" else BufferKind.INPUT
        result = BufferKind.GRADIENT if phase == "backward" else BufferKind.OUTPUT
        given = [self._buffer(handed)]
        made: list[int] = []
        for number in range(num_ops):
            known = [*self._weights, *given, *saved, *made]
            # Recent buffers more often than old ones, so that chains are common and skips occur.
            reads = draw(st.lists(st.sampled_from(known[-3:] + known), min_size=1, max_size=3, unique=True))
            style = draw(st.sampled_from(["new", "new", "new", "two", "in place", "view"]))
            own = [buffer for buffer in reads if self._buffers[buffer].kind is BufferKind.ACTIVATION]
            is_last = number == num_ops - 1
            writes = []
            if style in ("new", "two") or is_last or (style == "in place" and not own):
                kind = result if is_last or draw(st.integers(0, 9)) == 0 else BufferKind.ACTIVATION
                writes = [self._buffer(kind) for _ in range(2 if style == "two" else 1)]
                made += writes
            elif style == "in place":
                writes = own[:1]
            self._ops.append(
                Op(
                    index=len(self._ops),
                    name=f"{phase[0]}{graph}_{number}",
                    target="test.op",
                    source=f"test.py:{len(self._ops) + 1}",
                    reads=tuple(reads),
                    writes=tuple(writes),
                    is_view=not writes,
                    is_repeatable=draw(st.booleans()),
                    module=draw(st.sampled_from(["", "a.0", "a.0", "a.1"])),
                )
            )
        self._segments.append(Segment(graph, phase, start, len(self._ops)))
        return [buffer for buffer in made if self._buffers[buffer].kind is BufferKind.ACTIVATION]

    def step(self) -> Step:
        program = Program(
            name="random",
            ops=tuple(self._ops),
            buffers=tuple(self._buffers),
            values=tuple(Value(b.id, f"b{b.id}", b.id, "uint8", (b.nbytes,), (1,), 0) for b in self._buffers),
            segments=tuple(self._segments),
        ).with_gradients(self._draw(st.sampled_from([BufferKind.GRADIENT, BufferKind.ACCUMULATED_GRADIENT])))
        return Step(program, self._draw(costs(len(self._ops))))


@st.composite
def costs(draw: st.DrawFn, num_ops: int) -> OpCosts:
    """Seconds and scratch bytes of ``num_ops`` ops."""
    seconds = draw(st.lists(SECONDS, min_size=num_ops, max_size=num_ops))
    scratch = draw(st.lists(st.sampled_from([0, 0, 0, 3]), min_size=num_ops, max_size=num_ops))
    return OpCosts(tuple(seconds), tuple(scratch), "unit")


@st.composite
def cyclic_steps(draw: st.DrawFn, *, max_ops: int = 7) -> Step:
    """A whole step: forward only, or of several micro-batches whose summed gradients update the weights they are of.

    Some weights are frozen, some are also written by a forward.
    """
    micro_batch = draw(steps(max_ops=max_ops)).program
    weights = [buffer.id for buffer in micro_batch.buffers if buffer.kind is BufferKind.PARAMETER]
    gradients = [b.id for b in micro_batch.buffers if b.kind in (BufferKind.GRADIENT, BufferKind.ACCUMULATED_GRADIENT)]
    trained = draw(st.integers(0, min(len(weights), len(gradients))))
    program = training_step(
        replace(micro_batch, gradients=tuple(zip(weights, gradients[:trained], strict=False))),
        draw(st.sampled_from(list(OPTIMIZERS.values()))),
        micro_batches=draw(st.integers(1, 3)),
        clip_norm=draw(st.booleans()),
    )
    ops = tuple(
        replace(op, writes=(*op.writes, op.reads[0]), is_repeatable=False)
        if program.buffers[op.reads[0]].kind is BufferKind.WEIGHT and draw(st.integers(0, 9)) == 0
        else op
        for op in program.ops
    )
    return Step(replace(program, ops=ops), draw(costs(len(ops))))


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    """A constant rate with latency, or a curve of measured points."""
    if draw(st.booleans()):
        return Rate.constant(draw(st.sampled_from([0.3, 1.0, 4.0, 1e9])), draw(st.sampled_from([0.0, 0.5])))
    sizes = sorted(draw(st.sets(st.integers(1, 9000), min_size=1, max_size=4)))
    seconds = sorted(draw(st.lists(st.floats(0.01, 50), min_size=len(sizes), max_size=len(sizes))))
    return Rate(tuple(zip(sizes, seconds, strict=True)))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """A machine with one tier, "host", that is large enough for any random step."""
    factors = (draw(st.sampled_from(some)) for some in ([1.0, 0.8, 0.5], [1.0, 0.7], [1.0, 0.6]))
    link = Link(draw(rates()), draw(rates()), *factors)
    host = draw(st.sampled_from([None, None, Host(0.0, 2.5), Host(1.5, 0.0), Host(1.0, 4.0)]))
    return Machine("random", 2**40, 1.0, 1.0, 0.0, (Tier("host", 2**40, link),), host)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network of nodes of up to four ranks."""
    in_node = draw(st.integers(1, 4))
    per_link, between = draw(st.integers(1, in_node)), draw(st.one_of(st.none(), rates()))
    busy_factor, compute_factor = (draw(st.sampled_from([1.0, 1.0, 0.75, 0.25])) for _ in range(2))
    algorithm = draw(st.sampled_from(ALGORITHMS))
    return Network("random", in_node, per_link, algorithm, draw(rates()), between, busy_factor, compute_factor)
