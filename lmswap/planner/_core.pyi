"""The search for plans in C++ (csrc/planner). Ids and positions are those of `lmswap.ir`."""

from collections.abc import Sequence

class Step:
    """``life`` by buffer: 0 activation, 1 to the end of the step, 2 tangent; buffers outside the step are in no list.

    ``segments`` are (start, stop, the forward segment of a backward one or -1).
    """

    def __init__(
        self,
        *,
        seconds: Sequence[float],
        scratch_bytes: Sequence[int],
        repeatable: Sequence[bool],
        reads: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        nbytes: Sequence[int],
        life: Sequence[int],
        segments: Sequence[tuple[int, int, int]],
    ) -> None: ...

class Link:
    """Two rates as (nbytes, seconds), and the host's seconds to queue an op and a copy."""

    def __init__(
        self,
        *,
        out: Sequence[tuple[int, float]],
        into: Sequence[tuple[int, float]],
        both_factor: float,
        compute_factor: float,
        host_op_seconds: float,
        host_copy_seconds: float,
    ) -> None: ...

class Swap:
    """As `lmswap.ir.plan.Swap`; ``out_start`` -1: an earlier host copy is valid."""

    copy: int
    out_start: int
    release: int
    in_start: int
    first_use: int

class Found:
    """Result of a search; ``reruns`` are recomputes as (op, position)."""

    fits: bool
    seconds: float
    excess_bytes: int
    swaps: list[Swap]
    reruns: list[tuple[int, int]]
    evaluations: int
    worst_op: int

class Limits:
    """Limits of a plan; ``may_redo`` allows recomputes."""

    def __init__(
        self, *, budget_bytes: int, tier_bytes: int, min_swap_bytes: int, may_swap: bool, may_redo: bool
    ) -> None: ...

def search(
    step: Step, link: Link, limits: Limits, *, most_evaluations: int, target_seconds: float, seed: int
) -> Found: ...
def pack(
    blocks: Sequence[tuple[int, int, int, int, int]], *, apart_bytes: int, most_visits: int
) -> tuple[list[int], int]:
    """Blocks are (start, stop, nbytes, above, group), -1 for none; the offset of each, and the capacity."""

def find_exactly(step: Step, link: Link, limits: Limits, *, most_states: int) -> Found | None: ...
