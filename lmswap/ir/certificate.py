"""Lower bounds on the seconds of any plan of a step, with the prices that prove them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Certificate:
    """No plan for one program, machine, tier and budget takes less than ``seconds``: weak duality, by these prices.

    Cuts split the step's ops into zones, one more than there are cuts::

        ops      0  1  2  3  4  5  6  7  8
        cuts              3        6
        zones    [  0   ) .  [ 1  ) .  [ 2 )

    Memory while the op of a cut runs costs its price for each byte, and each lane's time costs its price in each zone.
    Compute's time costs what those two leave of 1, and more where copies slow it down. Every buffer is then kept,
    swapped and recomputed as cheaply as it can be by itself, and what the budget and the lanes offer is subtracted at
    the same prices: a lower bound for any prices. `lmswap.planner.bound.verify_certificate` has the formula and the
    proof.

    ``seconds`` is infinite if what must be resident at the one cut exceeds the budget: then no plan exists.
    """

    seconds: float
    cuts: tuple[int, ...] = ()  # ops, ascending
    memory_prices: tuple[float, ...] = ()  # by cut: seconds per byte
    out_prices: tuple[float, ...] = (0.0,)  # by zone: seconds per second of the lane
    in_prices: tuple[float, ...] = (0.0,)

    def __repr__(self) -> str:
        return f"<certificate of {self.seconds:.4g} s, by {len(self.cuts)} cuts; see its fields>"
