"""The parts of a backward: between two of them autograd accumulates the gradients that the first has completed."""

from __future__ import annotations

from lmswap.ir.program import Program

# A cut costs the host about 50 µs. DistributedDataParallel's first bucket has 1 MiB, the others 25 MiB.
_MIN_BYTES, _MAX_PARTS = 2**20, 32


def part_bytes(nbytes: int) -> int:
    """Return the least bytes of results per part, of ``nbytes`` in all."""
    return max(_MIN_BYTES, nbytes // _MAX_PARTS)


def streamed_gradient_bytes(program: Program) -> dict[int, int]:
    """Return, by op, what gradients that stream take beside the step's own buffers.

    While a part runs, those of the one before it are copied out, and those that it adds to in; what it has completed
    is held until it ends.
    """
    gradients = {buffer.id: buffer.nbytes for buffer in program.buffers if buffer.is_gradient}
    last_use = {buffer: op.index for op in program.ops for buffer in (*op.reads, *op.writes) if buffer in gradients}
    completed = [0] * len(program.ops)
    for buffer, op in last_use.items():
        completed[op] += gradients[buffer]
    found: dict[int, int] = {}
    for segment in program.segments:
        enough = part_bytes(sum(completed[segment.start : segment.stop]))
        start, leaving_bytes, own_bytes = segment.start, 0, 0
        for op in range(segment.start, segment.stop):
            own_bytes += completed[op]
            if own_bytes >= enough or op == segment.stop - 1:
                held_bytes = leaving_bytes + own_bytes
                for each in range(start, op + 1):
                    found[each] = held_bytes
                    held_bytes += completed[each]
                start, leaving_bytes, own_bytes = op + 1, own_bytes, 0
    return {op: nbytes for op, nbytes in found.items() if nbytes}
