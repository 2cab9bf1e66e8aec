"""What each op of a program costs on a machine: seconds, and bytes of scratch while it runs."""

from __future__ import annotations

from dataclasses import dataclass


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
