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

    @property
    def free_seconds(self) -> float:
        """What a step takes in unlimited memory: each op once, no waits."""
        return sum(self.seconds)

    def with_scratch(self, scratch_bytes: Mapping[int, int]) -> OpCosts:
        """These costs with other scratch bytes for some ops."""
        return replace(self, scratch_bytes=tuple(scratch_bytes.get(o, b) for o, b in enumerate(self.scratch_bytes)))
