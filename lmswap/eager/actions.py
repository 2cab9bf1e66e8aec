"""What does a plan ask for at each event of a step? Plan → copies out, releases and copies in by position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lmswap.eager.recording import Recorded
from lmswap.ir.plan import Plan, Swap


@dataclass(frozen=True)
class Actions:
    """At one position, in this order; storages by number."""

    outs: tuple[Swap, ...]
    releases: tuple[int, ...]
    ins: tuple[int, ...]


class PlannedEvents:
    """A recorded step's events, and what is to be done at each."""

    def __init__(self, graph: int, step: Recorded, plan: Plan) -> None:
        """``graph`` is the number under which the session knows the step."""
        self.graph, self.step = graph, step
        self.saves, self.needs = step.saves, step.needs
        self._actions = _by_position(plan.swaps)
        # The group after which a storage is not needed any more.
        self.last_need = {number: at for at, group in enumerate(step.groups) for number in group.numbers}

    def is_of(self, step: Recorded) -> bool:
        """Whether ``step`` had the same events."""
        return (self.saves, self.needs) == (step.saves, step.needs)

    def goes_on_from(self, saves: Sequence[tuple[int, int]], needs: Sequence[int] | None) -> bool:
        """Whether a step can still become this one; ``needs`` is None while it runs forward."""
        if needs is None:
            return self.saves[: len(saves)] == tuple(saves)
        return self.saves == tuple(saves) and self.needs[: len(needs)] == tuple(needs)

    def at(self, position: int) -> Actions | None:
        """What is to be done at a position of the plan: see `lmswap.eager.recording` for which event that is."""
        return self._actions.get(position)


def _by_position(swaps: Sequence[Swap]) -> dict[int, Actions]:
    outs = defaultdict[int | None, list[Swap]](list)
    releases, ins = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for swap in swaps:
        outs[swap.out_start].append(swap)
        releases[swap.release].append(swap.buffer)
        ins[swap.in_start].append(swap.buffer)
    return {
        at: Actions(tuple(outs.get(at, ())), tuple(releases.get(at, ())), tuple(ins.get(at, ())))
        for at in {*outs, *releases, *ins}
        if at is not None
    }
