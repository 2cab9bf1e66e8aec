"""Lower bound on the seconds of any plan: memory of a step + machine + budget → `Certificate`."""

from __future__ import annotations

import math

import numpy as np

from lmswap.analyze.memory import Bytes, StepMemory
from lmswap.ir.certificate import Certificate
from lmswap.ir.machine import Link, Machine
from lmswap.planner.bound.dual import Ints, Prices, dual, idle_intervals, min_resident_bytes

# Fewer cuts weaken the bound; more than these strengthen it little.
_NUM_PEAK_CUTS, _NUM_TIGHT_CUTS, _NUM_EVEN_CUTS = 8, 8, 4


def certify(memory: StepMemory, machine: Machine, *, budget_bytes: int, tier: str, min_swap_bytes: int) -> Certificate:
    """The best proven bound on the seconds of any plan that keeps, swaps to ``tier`` and recomputes.

    It is infinite where the bytes that must be resident at one op exceed the budget, and never less than the sum of the
    ops, or than the host's seconds to queue each of them once. Limits are those of `lmswap.planner.make_plan`.

    Raises:
        OptionError: ``machine`` has no such tier.
    """
    link = machine.tier(tier).link.while_busy
    host_seconds = machine.host.seconds(len(memory.program.ops), 0) if machine.host else 0.0
    trivial = Certificate(max(memory.op_starts[-1], host_seconds))
    if not len(memory.curve) or memory.curve.max() <= budget_bytes:
        return trivial
    found = idle_intervals(memory, link, min_swap_bytes)
    least = min_resident_bytes(memory, found)
    if least.max() > budget_bytes:
        return Certificate(math.inf, (int(least.argmax()),), (0.0,), (0.0, 0.0), (0.0, 0.0))
    from lmswap.planner.bound.price_lp import best_prices  # here, see `lmswap.planner.import_search`

    cuts = _cuts(memory, least, budget_bytes)
    step = dual(memory, found, cuts, budget_bytes, link)
    prices = best_prices(step, budget_bytes)
    seconds = step.bound(prices)
    return _without_redundant_cuts(seconds, cuts, prices) if seconds > trivial.seconds else trivial


def budget_lower_bound(memory: StepMemory, link: Link, min_swap_bytes: int) -> tuple[int, int]:
    """Lower bound on the budget of any plan, by the same proof, and the op where it is reached."""
    least = min_resident_bytes(memory, idle_intervals(memory, link, min_swap_bytes))
    return int(least.max()), int(least.argmax())


def _cuts(memory: StepMemory, least: Bytes, budget_bytes: int) -> Ints:
    """The ops over the budget with the most bytes, those with the least memory for idle buffers, and some between.

    Of each kind one in every stretch. The last let prices change where memory does not bind, as when the out lane is
    idle at first.
    """
    over = np.flatnonzero(memory.curve > budget_bytes)
    fullest = [part[memory.curve[part].argmax()] for part in np.array_split(over, min(_NUM_PEAK_CUTS, len(over)))]
    tightest = [part[least[part].argmax()] for part in np.array_split(over, min(_NUM_TIGHT_CUTS, len(over)))]
    times = np.linspace(0.0, memory.op_starts[-1], _NUM_EVEN_CUTS + 2)[1:-1]
    between = np.searchsorted(memory.op_starts[1:-1], times, "right")
    return np.unique(np.concatenate([fullest, tightest, between]).astype(np.int64))


def _without_redundant_cuts(seconds: float, cuts: Ints, prices: Prices) -> Certificate:
    """The certificate without redundant cuts."""
    out, into = prices.out, prices.into
    matters = (prices.memory > 0) | (out[1:] != out[:-1]) | (into[1:] != into[:-1])
    zones = np.append(True, matters)
    parts = (cuts[matters], prices.memory[matters], out[zones], into[zones])
    return Certificate(seconds, *(tuple(part.tolist()) for part in parts))
