"""Measures the memory of traces, and evicts those that are not used any more.

A trace is a graph of Dynamo's with its guards, the graphs that AOTAutograd made of it, generated code and plans. On a
CPU all of that counts against the budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from lmswap.ir.program import BufferKind
from lmswap.session.compiled_graph import CapturedGraph, Evicted, Graphs, SavedSequence
from lmswap.session.context import ModelContext
from lmswap.session.plan_store import StepPlans

# A trace that no step has used for so many is evicted: of 32 shapes in random order, one in some 400,000 steps.
UNUSED_STEPS = 512
_LOOK_EVERY = 64  # steps
_RECENT_STEPS = 2  # their traces stay, even if memory is short
# Of a budget, that traces may take. Those of 4 layers of a transformer took 5 to 12 MiB each.
MAX_SHARE = 0.25


class Traces:
    """The traces of one model."""

    def __init__(self, context: ModelContext, plans: StepPlans, graphs: Graphs) -> None:
        """``graphs`` are the model's; `Evicted` replaces evicted ones there."""
        self._graphs, self._plans, self._recorder = graphs, plans, context.engine.recorder
        self._memory, self._budget = context.memory, context.budget
        self._found_bytes: int | None = None  # held before the traces that were made since the last step began
        self._next_look = _LOOK_EVERY
        self.nbytes = 0  # that traces hold, as measured
        self.num_evicted = 0

    @property
    def num_kept(self) -> int:
        """The number of graphs that are traced or, for other sizes, made of the same trace."""
        return len(self._kept())

    @property
    def num_traced(self) -> int:
        """The number of traces."""
        return len({id(graph.trace) for graph in self._kept()})

    @property
    def num_sized(self) -> int:
        """The number of graphs, each with its plan, for sizes that vary."""
        return sum(graph.sizes.vary for graph in self._kept())

    def begin(self) -> None:
        """Prepare to measure a trace that is about to be made."""
        if self._found_bytes is None:
            self._found_bytes = self._memory.other_bytes()

    def look(self) -> None:
        """Measure, between two steps, what new traces hold; evict those not used for long, or beyond `MAX_SHARE`."""
        if self._found_bytes is not None:
            self._memory.collect()
            self.nbytes += max(0, self._memory.other_bytes() - self._found_bytes)
            self._found_bytes = None
            self._evict_excess()
        if self._recorder.num_steps >= self._next_look:
            self._next_look = self._recorder.num_steps + _LOOK_EVERY
            self._evict(self._unused_for(UNUSED_STEPS))

    def evict_half(self) -> bool:
        """Evict the half of the traces that has not been used for longest, as memory is short; whether any was."""
        unused = self._unused_for(_RECENT_STEPS) if self.nbytes else []  # on a GPU traces hold no device memory
        return self._evict(unused[: (len(unused) + 1) // 2])

    def _evict_excess(self) -> None:
        """Evict the traces that have not been used for longest while all of them hold too much of the budget."""
        excess_bytes = self.nbytes - MAX_SHARE * self._budget.nbytes
        if excess_bytes > 0:
            num_excess = math.ceil(excess_bytes * self.num_kept / self.nbytes)  # of their mean size
            self._evict(self._unused_for(_RECENT_STEPS)[:num_excess])

    def evict_all(self) -> None:
        """Evict all traces and their plans: no call of the model runs them any more; pending backwards keep theirs."""
        gone = {index for index, graph in enumerate(self._graphs) if not isinstance(graph, SavedSequence)}
        for graph in self._kept():
            graph.entry.evict()
            for each in (graph, *graph.again):
                each.release()
                self._graphs[each.index] = Evicted(each.index)
        self._plans.drop(lambda graphs: not gone.isdisjoint(graphs))
        self.nbytes, self._found_bytes = 0, None

    def evict_complete(self) -> None:
        """Evict all traces but those that are being made; pending backwards can still run."""
        self._evict([graph.index for graph in self._kept()])

    def evict_placing(self, names: Collection[str]) -> None:
        """Evict the traces whose plans place one of these weights."""
        placing = [
            graph.index
            for graph in self._kept()
            if any(b.kind is BufferKind.WEIGHT and b.name in names for b in graph.program.buffers)
        ]
        self._evict(placing)

    def _kept(self) -> list[CapturedGraph]:
        captured = [graph for graph in self._graphs if isinstance(graph, CapturedGraph)]
        clones = {clone.index for graph in captured for clone in graph.again}
        return [graph for graph in captured if graph.index not in clones]

    def _unused_for(self, num_steps: int) -> list[int]:
        """Return the traces that none of the last ``num_steps`` steps has used, the oldest first.

        A backward that is still to come holds what it needs.
        """
        last_step = self._recorder.num_steps - num_steps
        unused = [graph for graph in self._kept() if graph.last_step <= last_step]
        return [graph.index for graph in sorted(unused, key=lambda graph: graph.last_step)]

    def _evict(self, unused: list[int]) -> bool:
        found_bytes, num_evicted = self._memory.other_bytes(), 0
        gone: set[int] = set()
        for index in unused:
            gone |= self._evict_one(index)
            num_evicted += index in gone
        if not gone:
            return False
        self.num_evicted += num_evicted
        self._plans.drop(lambda graphs: not gone.isdisjoint(graphs))
        self._memory.collect()
        freed_bytes = max(0, found_bytes - self._memory.other_bytes())
        self.nbytes = max(0, self.nbytes - freed_bytes)
        if self._found_bytes is not None:  # a trace is being made, and will be measured
            self._found_bytes -= freed_bytes
        return True

    def _evict_one(self, index: int) -> set[int]:
        """Evict a trace; return the numbers of its graphs, none if Dynamo has no entry of it that could be evicted."""
        graph = self._graphs[index]
        if not isinstance(graph, CapturedGraph) or not graph.entry.evict():
            return set()
        gone = [graph, *graph.again]
        for each in gone:
            each.release()
            self._graphs[each.index] = Evicted(each.index)
        return {each.index for each in gone}
