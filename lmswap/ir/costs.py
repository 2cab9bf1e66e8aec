"""What each op of a program costs on a machine: seconds, and bytes of scratch while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpCosts:
    """Costs by op index. ``source`` is "measured", "roofline" (estimated) or "unit" (tests: one second an op)."""

    seconds: tuple[float, ...]
    scratch_bytes: tuple[int, ...]  # allocated and freed inside the op: workspaces, layout copies
    source: str
    scratch_blocks: tuple[tuple[int, ...], ...] = ()  # the pieces that these consist of; none: all in one piece

    @property
    def free_seconds(self) -> float:
        """What a step takes in unlimited memory: each op once, no waits."""
        return sum(self.seconds)

    def with_scratch(self, scratch_bytes: Mapping[int, int]) -> OpCosts:
        """These costs with other scratch bytes, each in one piece, for some ops."""
        blocks = tuple((scratch_bytes[o],) if o in scratch_bytes else b for o, b in enumerate(self.scratch_blocks))
        scratch = tuple(scratch_bytes.get(o, b) for o, b in enumerate(self.scratch_bytes))
        return replace(self, scratch_bytes=scratch, scratch_blocks=blocks)

    def blocks(self, op: int) -> tuple[int, ...]:
        """The pieces of the scratch of ``op``, in bytes."""
        return self.scratch_blocks[op] if self.scratch_blocks else (self.scratch_bytes[op],)
