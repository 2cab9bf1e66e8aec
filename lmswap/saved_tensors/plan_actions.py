"""Actions of a plan by event of a recorded step: swap-outs, releases and swap-ins at each position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lmswap.ir.plan import Plan, Swap
from lmswap.saved_tensors.recording import Recorded


@dataclass(frozen=True)
class Actions:
    """Actions at one position, executed in the order of the fields; storages by number."""

    swap_outs: tuple[Swap, ...]
    releases: tuple[int, ...]
    swap_ins: tuple[int, ...]


class PlannedEvents:
    """The events of a recorded step, with the actions planned at each."""

    def __init__(self, graph: int, step: Recorded, plan: Plan) -> None:
        """``graph``: the session's number of the step that ``plan`` was made for."""
        self.graph, self.step = graph, step
        self.saves, self.needs = step.saves, step.needs
        self._actions = _by_position(plan.swaps)
        # By storage: the index of the last group that needs it.
        self.last_group = {number: at for at, group in enumerate(step.groups) for number in group.numbers}

    def matches(self, step: Recorded) -> bool:
        """Return whether ``step`` had the same events."""
        return (self.saves, self.needs) == (step.saves, step.needs)

    def can_match(self, saves: Sequence[tuple[int, int]], needs: Sequence[int] | None) -> bool:
        """Return whether a step with these events so far can still match; ``needs`` is None during the forward."""
        if needs is None:
            return self.saves[: len(saves)] == tuple(saves)
        return self.saves == tuple(saves) and self.needs[: len(needs)] == tuple(needs)

    def at(self, position: int) -> Actions | None:
        """Return the actions at a position of the plan; `lmswap.saved_tensors.recording` defines the event of each."""
        return self._actions.get(position)


def _by_position(swaps: Sequence[Swap]) -> dict[int, Actions]:
    swap_outs = defaultdict[int | None, list[Swap]](list)
    releases, swap_ins = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for swap in swaps:
        swap_outs[swap.out_start].append(swap)
        releases[swap.release].append(swap.buffer)
        swap_ins[swap.in_start].append(swap.buffer)
    return {
        at: Actions(tuple(swap_outs.get(at, ())), tuple(releases.get(at, ())), tuple(swap_ins.get(at, ())))
        for at in {*swap_outs, *releases, *swap_ins}
        if at is not None
    }
