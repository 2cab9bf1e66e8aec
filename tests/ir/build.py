"""Small programs from a few lines of text, for tests of every stage that needs no torch.

    step = build('''
        forward
        f1 1: x -> a
        f2 2: a -> y
        backward
        g2 2: t a -> gx
    ''', sizes={"a": 4}, outputs="y", tangents="t", gradients="gx")

An op is "name[@module] seconds[!random|!view]: reads -> writes". A name that is read before any op writes it is an
input, one in upper case a parameter. A segment header may name its graph: "forward 1". Sizes are 1 byte unless said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Link, Machine, Rate, Tier
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment, Value

PHASES = ("forward", "backward", "inference", "update")


@dataclass(frozen=True)
class Step:
    """A program and its costs; `id` finds a buffer by the name in the text."""

    program: Program
    costs: OpCosts

    def id(self, name: str) -> int:
        return self.program.buffer_names.index(name)

    def op(self, name: str) -> int:
        return next(op.index for op in self.program.ops if op.name == name)


def build(
    text: str,
    *,
    sizes: Mapping[str, int] | None = None,
    scratch: Mapping[str, int] | None = None,
    outputs: str = "",
    tangents: str = "",
    gradients: str = "",
    weights: str = "",
    states: str = "",
    summed: str = "",
    name: str = "test",
) -> Step:
    ids: dict[str, int] = {}
    read_first: set[str] = set()
    ops: list[Op] = []
    segments: list[Segment] = []
    seconds: list[float] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        head, colon, body = line.partition(":")
        if not colon:
            phase, *graph = head.split()
            assert phase in PHASES, line
            segments.append(Segment(int(graph[0]) if graph else 0, phase, len(ops), len(ops)))
            continue
        whose, spec = head.split()
        label, _, module = whose.partition("@")
        duration, _, mark = spec.partition("!")
        reads, _, writes = body.partition("->")
        for buffer in (*reads.split(), *writes.split()):
            if buffer not in ids:
                ids[buffer] = len(ids)
                if buffer in reads.split():
                    read_first.add(buffer)
        ops.append(
            Op(
                index=len(ops),
                name=label,
                target=f"test.{label}",
                source=f"test.py:{len(ops) + 1} {label}",
                reads=tuple(ids[buffer] for buffer in reads.split()),
                writes=tuple(ids[buffer] for buffer in writes.split()),
                is_view=mark == "view",
                is_repeatable=mark != "random",
                module=module,
            )
        )
        seconds.append(float(duration))
        last = segments[-1]
        segments[-1] = Segment(last.graph, last.phase, last.start, len(ops))

    def kind(buffer: str) -> BufferKind:
        if buffer in outputs.split():
            return BufferKind.OUTPUT
        if buffer in tangents.split():
            return BufferKind.TANGENT
        if buffer in gradients.split():
            return BufferKind.GRADIENT
        for names, found in (
            (weights, BufferKind.WEIGHT),
            (states, BufferKind.OPTIMIZER_STATE),
            (summed, BufferKind.SUMMED_GRADIENT),
        ):
            if buffer in names.split():
                return found
        if buffer in read_first:
            return BufferKind.PARAMETER if buffer.isupper() else BufferKind.INPUT
        return BufferKind.ACTIVATION

    program = Program(
        name=name,
        ops=tuple(ops),
        buffers=tuple(Buffer(index, (sizes or {}).get(buffer, 1), kind(buffer)) for buffer, index in ids.items()),
        values=tuple(Value(index, buffer, index, "uint8", (1,), (1,), 0) for buffer, index in ids.items()),
        segments=tuple(segments),
    )
    workspaces = tuple((scratch or {}).get(op.name, 0) for op in ops)
    return Step(program, OpCosts(tuple(seconds), workspaces, "unit"))


def unit_machine(
    *, out: float = 1.0, into: float = 1.0, latency: float = 0.0, both_factor: float = 1.0, capacity: int = 2**30
) -> Machine:
    """One byte a second each way unless said, one flop and one byte of traffic a second, tiers host and disk alike."""
    link = Link(Rate.constant(out, latency), Rate.constant(into, latency), both_factor)
    tiers = (Tier("host", capacity, link), Tier("disk", capacity, link))
    return Machine("unit", 2**30, 1.0, 1.0, 0.0, tiers)
