"""The search for plans in C++ (csrc/planner). Ids and positions are those of `lmswap.ir`."""

from collections.abc import Sequence

class Step:
    """The ops of a step and their buffers; buffers that live outside the step are in no list.

    ``lifetime`` by buffer: 0 activation, 1 to the end of the step, 2 tangent, 3 resident to its last use, 4 summed
    gradient, 5 persistent, 6 fetched: persistent, and non-resident between steps if it is swapped.
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
        lifetime: Sequence[int],
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

    version: int
    out_start: int
    release: int
    in_start: int
    first_use: int

class SearchResult:
    """Result of a search; ``recomputes`` are (op, position)."""

    fits: bool
    seconds: float
    excess_bytes: int
    swaps: list[Swap]
    recomputes: list[tuple[int, int]]
    evaluations: int
    worst_op: int

class Limits:
    """Limits of a plan; ``may_recompute`` allows recomputes. A search queues ``prefetches_ahead`` copies in ahead."""

    def __init__(
        self,
        *,
        budget_bytes: int,
        tier_bytes: int,
        min_swap_bytes: int,
        may_swap: bool,
        may_recompute: bool,
        prefetches_ahead: int,
    ) -> None: ...

class Prices:
    """Those of a certificate, see `lmswap.ir.certificate`; a search of a cyclic step prefers what is cheap at them."""

    def __init__(
        self, *, cuts: Sequence[int], memory: Sequence[float], out: Sequence[float], into: Sequence[float]
    ) -> None: ...

def search(
    step: Step,
    link: Link,
    limits: Limits,
    *,
    max_evaluations: int,
    target_seconds: float,
    tolerated_excess_bytes: int = 0,
    prices: Prices = ...,
    seed: int,
) -> SearchResult:
    """Search until the step takes ``target_seconds``, or exceeds its budget by no more than the tolerated excess."""

def predict(step: Step, link: Link, plan: SearchResult) -> float:
    """Seconds of the step under the plan, as `lmswap.planner.simulate` predicts them."""

def pack(
    blocks: Sequence[tuple[int, int, int, int, int]], *, separation_bytes: int, max_visits: int
) -> tuple[list[int], int]:
    """Blocks are (start, stop, nbytes, above, group), -1 for none; the offset of each, and the capacity."""

def find_exactly(step: Step, link: Link, limits: Limits, *, max_states: int) -> SearchResult | None: ...
