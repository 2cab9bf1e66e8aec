"""Costs of a program's ops on a machine: seconds, and bytes of scratch while each runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation of an op: for the result at position ``result`` of its ``writes``, or scratch (None)."""

    nbytes: int
    result: int | None = None


@dataclass(frozen=True)
class OpCosts:
    """Costs by op index. ``source`` is "measured", "roofline" (estimated) or "unit" (tests: one second an op).

    ``pieces`` are the allocations of ops as traced in torch's allocator on a GPU, equal ones in order of address.
    ``first_run_bytes`` are what a process keeps once the ops have run in it: code and caches of their kernels.
    """

    seconds: tuple[float, ...]
    scratch_bytes: tuple[int, ...]  # allocated and freed inside the op: workspaces, layout copies
    source: str
    pieces: tuple[tuple[Piece, ...], ...] = ()
    first_run_bytes: int = 0

    @property
    def free_seconds(self) -> float:
        """Seconds of a step in unlimited memory: each op once, no waits."""
        return sum(self.seconds)

    def with_scratch(self, scratch_bytes: Mapping[int, int]) -> OpCosts:
        """These costs with other scratch bytes, each in one piece, for some ops."""
        if not scratch_bytes:
            return self
        pieces = tuple((Piece(scratch_bytes[o]),) if o in scratch_bytes else p for o, p in enumerate(self.pieces))
        scratch = tuple(scratch_bytes.get(o, b) for o, b in enumerate(self.scratch_bytes))
        return replace(self, scratch_bytes=scratch, pieces=pieces)

    def of(self, op: int) -> tuple[Piece, ...]:
        """The allocations of ``op``; where none were traced, its scratch in one piece."""
        return self.pieces[op] if self.pieces else (Piece(self.scratch_bytes[op]),)
