"""Search for a plan whose packed arena fits: the fragmentation of a plan is known only after packing.

A plan that is too large first gets shorter residencies, which cost no time; then a smaller budget to plan with.
"""

from __future__ import annotations

from collections.abc import Callable

from lmswap.errors import PlanInfeasible
from lmswap.ir.plan import Plan

# Shares of the free time that `shrink_residency` uses. The rest makes up for a link slower than it was measured. In 21
# steps (seven networks at 70, 50 and 30 % of the peak, H200) arenas take 1.07 times what is held at once where no
# residency is shortened (at most 1.16), 1.01 at a half (1.09) and 1.00 at all of it (1.03); on a link at 70 % of its
# rate the steps take 1.5 % more at a half (at most 4.6), and 6.5 % at all of it (11), than without.
_SHARES = (0.0, 0.5, 1.0)
# The search ends when at most this share of the bytes could be gained.
_CLOSE_ENOUGH = 1 / 32
# It reduces the budget by a 256th at least, a quarter of a percent: smaller steps failed seven times in a row.
_STEPS = 256


def fit_arena(
    plan_within: Callable[[int], Plan], placed_bytes: Callable[[Plan, float], int], max_bytes: int
) -> tuple[Plan, float]:
    """The fastest plan found whose tensors, fragmentation included, take at most ``max_bytes``.

    Args:
        plan_within: plans for a budget in bytes, fragmentation not included.
        placed_bytes: bytes of a plan with fragmentation, its residencies shortened by a share.
        max_bytes: the limit.

    Returns:
        The plan, and the share by which its residencies must be shortened.

    Raises:
        PlanInfeasible: none was found; carries the bytes, with fragmentation, of the smallest plan tried.
    """
    withheld_bytes = too_few_bytes = 0  # withheld from plans
    enough_bytes: int | None = None
    found: list[tuple[Plan, float]] = []
    placed: list[int] = []
    refusal: PlanInfeasible | None = None
    while enough_bytes is None or enough_bytes - too_few_bytes > _CLOSE_ENOUGH * max_bytes:
        try:
            plan = plan_within(max_bytes - withheld_bytes)
        except PlanInfeasible as error:
            refusal = error.with_traceback(None)  # or the two would keep each other, and all callers' frames
            if withheld_bytes == enough_bytes:
                break
            enough_bytes = withheld_bytes = max_bytes - error.needed_bytes  # next: the smallest plan
            continue
        for share in _SHARES if plan.swaps else _SHARES[:1]:
            placed.append(placed_bytes(plan, share))
            excess_bytes = placed[-1] - max_bytes
            if excess_bytes <= 0:
                found.append((plan, share))
                enough_bytes = withheld_bytes
                break
        else:
            if withheld_bytes != enough_bytes:
                too_few_bytes = withheld_bytes
            elif excess_bytes > _CLOSE_ENOUGH * max_bytes:
                break  # no plan is that much smaller
        if enough_bytes is None:  # in growing steps: a slightly smaller budget may give the same layout
            withheld_bytes += max(excess_bytes, withheld_bytes // 2, max_bytes // _STEPS)
        elif enough_bytes == 0:
            break
        else:
            withheld_bytes = (too_few_bytes + enough_bytes) // 2
    if found:
        return min(found, key=lambda pair: pair[0].predicted_seconds)
    assert refusal is not None
    raise refusal.but(budget_bytes=max_bytes, needed_bytes=min(placed, default=refusal.needed_bytes))
