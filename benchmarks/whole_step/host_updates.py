"""Steps whose parameters the host updates (CPU Adam): gradients leave the device, new weights return.

The optimizer's state and the parameters in full precision are on the host for good. A step ends with three kinds of
ops, which take no memory of the device beyond a chunk of gradients:

* for each chunk, one before which its gradients have left. Copies back from the tier `GRADIENTS` take no time, as there
  are none;
* for each chunk, what the device waits for the host's update of it;
* one before which copies of new weights have arrived.

Sums of gradients over micro-batches on the host take no time here, in favour of these schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.whole_step.streaming import is_update
from lmswap.analyze.training_step import Optimizer
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine, Rate, Tier
from lmswap.ir.plan import Swap
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment
from lmswap.ir.timeline import Lane, Timeline

GRADIENTS = "gradients"
# Of host memory by element: a gradient of 2 bytes, the parameter and two moments in full precision read and written,
# and a bf16 weight written; as many where all is in full precision, as the gradient then has 4 and the weight is one.
_BYTES_PER_ELEMENT = 28


@dataclass(frozen=True)
class Chunk:
    """Parameters that are updated together: their weights, their gradients of all micro-batches, and elements."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class HostStep:
    """A step with the host's updates: its last ops are one for each chunk, one more for each, and the end."""

    program: Program
    chunks: tuple[Chunk, ...]

    @property
    def first_update(self) -> int:
        """The op in which the device waits for the update of the first chunk."""
        return len(self.program.ops) - 1 - len(self.chunks)

    def installs(self, chunk: int, kept: Sequence[int]) -> Iterator[Swap]:
        """Yield the copies of new weights of ``kept`` into their places, once the host has updated the chunk."""
        position, last = self.first_update + chunk + 1, len(self.program.ops) - 1
        yield from (Swap(weight, "host", 0, None, position, position, last) for weight in kept)

    def costs(self, costs: OpCosts, waits: Sequence[float]) -> OpCosts:
        """``costs`` with the seconds that the device waits for each chunk's update."""
        num_before = self.first_update - len(self.chunks)
        return replace(costs, seconds=(*costs.seconds[:num_before], *(0.0 for _ in waits), *waits, 0.0))

    def waits(self, before: Timeline, host_bytes_per_second: float, *, overlaps_backward: bool) -> tuple[float, ...]:
        """Seconds that the device waits for each update, which the host does one by one.

        Args:
            before: of the step without waits.
            host_bytes_per_second: of the host's memory, which limits CPU Adam.
            overlaps_backward: an update starts when its gradients have arrived; else when all have.
        """
        arrivals = {span.buffer: span.end_seconds for span in before.spans if span.lane is Lane.OUT}
        device = [span for span in before.spans if span.lane is Lane.COMPUTE][self.first_update].start_seconds
        host, waits = 0.0 if overlaps_backward else device, []
        for chunk in self.chunks:
            ready = max(arrivals[gradient] for gradient in chunk.gradients)
            host = max(host, ready) + chunk.elements * _BYTES_PER_ELEMENT / host_bytes_per_second
            waits.append(max(0.0, host - device))
            device = max(device, host)
        return tuple(waits)


def with_gradient_tier(machine: Machine) -> Machine:
    """``machine`` with the tier `GRADIENTS`: its host memory, from which nothing is copied back."""
    host = machine.tier("host")
    link = replace(host.link, in_rate=Rate.constant(1e30))
    return replace(machine, tiers=(*machine.tiers, Tier(GRADIENTS, host.capacity_bytes, link)))


def with_host_updates(step: Program, optimizer: Optimizer, *, sums_on_device: bool) -> HostStep:
    """``step`` with the host's updates.

    Args:
        step: of `lmswap.analyze.training_step`, updated in its last backward.
        optimizer: of the step.
        sums_on_device: gradients of micro-batches are summed on the device; else each leaves.
    """
    kinds = [buffer.kind for buffer in step.buffers]
    parts: dict[int, list[int]] = {}  # by summed gradient: those of all micro-batches
    chunks, ops, segments = [], [], []
    scratch_bytes = step.scratch_bytes or (0,) * len(step.ops)
    kept_scratch: list[int] = []
    for segment in step.segments:
        start = len(ops)
        for op in step.ops[segment.start : segment.stop]:
            if is_update(step, op.index):
                weights, summed = (
                    tuple(b for b in op.reads if kinds[b] is kind)
                    for kind in (BufferKind.WEIGHT, BufferKind.SUMMED_GRADIENT)
                )
                gradients = tuple(part for buffer in summed for part in (buffer, *parts.get(buffer, ())))
                chunks.append(Chunk(weights, gradients, op.flops // optimizer.flops))
            elif op.target == "aten.add_" and kinds[op.writes[0]] is BufferKind.SUMMED_GRADIENT and not sums_on_device:
                parts.setdefault(op.writes[0], []).append(op.reads[0])
            else:
                ops.append(replace(op, index=len(ops)))
                kept_scratch.append(scratch_bytes[op.index])
        segments.append(replace(segment, start=start, stop=len(ops)))
    start = len(ops)
    for name, reads in (
        *((f"gradients {number} leave", chunk.gradients) for number, chunk in enumerate(chunks)),
        *((f"host updates {number}", ()) for number in range(len(chunks))),
        ("new weights arrive", ()),
    ):
        ops.append(Op(len(ops), name, "host", "", reads, (), is_repeatable=False))
    segments.append(Segment(1 + max(segment.graph for segment in segments), "update", start, len(ops)))
    leaving = {gradient for chunk in chunks for gradient in chunk.gradients}

    def placed(buffer: Buffer) -> Buffer:
        if buffer.kind is BufferKind.OPTIMIZER_STATE:
            return Buffer(buffer.id, 0, BufferKind.ACTIVATION, buffer.name)
        return replace(buffer, kind=BufferKind.SUMMED_GRADIENT) if buffer.id in leaving else buffer

    program = replace(
        step,
        ops=tuple(ops),
        buffers=tuple(map(placed, step.buffers)),
        segments=tuple(segments),
        scratch_bytes=(*kept_scratch, *(0 for _ in ops[start:])),
    )
    return HostStep(program, tuple(chunks))
