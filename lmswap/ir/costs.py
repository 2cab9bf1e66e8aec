"""What each op of a program costs on a machine: seconds, and bytes of scratch while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory that an op takes for one of its results, by position in its ``writes``, or, None, as scratch."""

    nbytes: int
    result: int | None = None


@dataclass(frozen=True)
class OpCosts:
    """Costs by op index. ``source`` is "measured", "roofline" (estimated) or "unit" (tests: one second an op).

    ``pieces`` are what ops were seen to take from torch's allocator on a GPU, equal ones from the lowest address up.
    """

    seconds: tuple[float, ...]
    scratch_bytes: tuple[int, ...]  # allocated and freed inside the op: workspaces, layout copies
    source: str
    pieces: tuple[tuple[Piece, ...], ...] = ()

    @property
    def free_seconds(self) -> float:
        """What a step takes in unlimited memory: each op once, no waits."""
        return sum(self.seconds)

    def with_scratch(self, scratch_bytes: Mapping[int, int]) -> OpCosts:
        """These costs with other scratch bytes, each in one piece, for some ops."""
        pieces = tuple((Piece(scratch_bytes[o]),) if o in scratch_bytes else p for o, p in enumerate(self.pieces))
        scratch = tuple(scratch_bytes.get(o, b) for o, b in enumerate(self.scratch_bytes))
        return replace(self, scratch_bytes=scratch, pieces=pieces)

    def up_to(self, stop: int) -> OpCosts:
        """Those of the first ``stop`` ops."""
        return OpCosts(self.seconds[:stop], self.scratch_bytes[:stop], self.source, self.pieces[:stop])

    def of(self, op: int) -> tuple[Piece, ...]:
        """What ``op`` was seen to take; if nobody saw it, its scratch in one piece."""
        return self.pieces[op] if self.pieces else (Piece(self.scratch_bytes[op]),)
