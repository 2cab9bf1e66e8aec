"""Splits AOTAutograd's work on a region: the first stage, tracing, runs once, the second for each plan.

The first stage traces forward and backward together, which takes longer than all else but the search for a plan. The
second partitions them, has both compiled, and builds what autograd runs; it needs the graphs, which are edited for the
plan, and its description of the region, which it modifies. Both are kept as the first stage returned them, and each
plan gets copies::

    Dynamo's graph ──► first stage ──► forward, backward ──► copies, edited ──► second stage ──► compiled region
                                                        └──► copies, edited ──► second stage ──► … for another plan

A graph with symbolic sizes is kept as it was before it is partitioned, too: for plans of other sizes it is partitioned
again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import fx

from lmswap.progress import stage
from lmswap.runtime.codegen import BoxedFunction, SegmentGraph, copy_module
from lmswap.torch_compat.aot_autograd import FirstStage, intercepted_second_stage
from lmswap.torch_compat.sized_graphs import has_sizes
from lmswap.torch_compat.symbolic_sizes import Sizes
from lmswap.torch_compat.tracing import without_failure_warnings

_VARIANT_KEY = "lmswap_variant"  # in the meta of a graph


class Variant(Protocol):
    """A region as compiled for one plan: edits its graphs, which refer to it by `variant`."""

    def edit(self, graphs: Sequence[SegmentGraph]) -> None:
        """Edit the graphs of the region in place, before torch's compilers get them; see `GraphHandler.edit`."""

    def run(self, compiled: BoxedFunction, arguments: Sequence[Any]) -> Any:
        """Run the region by what torch ``compiled`` of the graphs; a piece of `OwnTime` ends and begins around that."""

    def __deepcopy__(self, _: object) -> Variant:
        return self  # torch copies backward graphs before it compiles them


def variant(graph: fx.GraphModule) -> Any:
    """Return the `Variant` of a graph passed to torch's compilers."""
    return graph.meta[_VARIANT_KEY]


class Compiled:
    """A region compiled for one plan, callable in its place."""

    def __init__(self, traced: _Traced, make_variant: MakeVariant, handler: Any) -> None:
        self._traced, self._make_variant = traced, make_variant
        self._variant = make_variant(handler, traced.sizes)
        self._compiled = traced.compile(self._variant)

    def __call__(self, *arguments: Any) -> Any:
        """Return the region's results for ``arguments``."""
        return self._variant.run(self._compiled, arguments)

    def compile_again(self, handler: Any) -> Compiled:
        """Return the region compiled for another plan, of ``handler``, without another trace.

        It may be called from anywhere. Neither result holds the other.
        """
        with self._traced.resumed():
            return Compiled(self._traced, self._make_variant, handler)

    def compile_for(self, sizes: Sizes, handler: Any) -> Compiled:
        """Return the region compiled for a plan of other ``sizes``; see `compile_again`."""
        traced = self._traced.resized(sizes)
        with traced.resumed():
            return Compiled(traced, self._make_variant, handler)


# Makes the variant of a handler; sizes, if not those of the trace, are those for which graphs are lowered.
MakeVariant = Callable[[Any, Sizes | None], Variant]


def trace_once(
    compile_region: Callable[[], Any],
    make_variant: MakeVariant,
    handler: Any,
    around: Callable[[Any], AbstractContextManager[Any]],
) -> Compiled:
    """Run ``compile_region``, which calls AOTAutograd once, and return the region compiled for the first plan.

    Args:
        compile_region: its result is discarded.
        make_variant: see `MakeVariant`.
        handler: that of the first plan.
        around: returns the context that the compilers need besides a tracing context, from the fake mode.
    """
    made: list[Compiled] = []

    def second_stage(first: FirstStage) -> Compiled:
        made.append(Compiled(_Traced(first, around), make_variant, handler))
        return made[0]

    with intercepted_second_stage(second_stage), without_failure_warnings():
        compile_region()
    (compiled,) = made
    return compiled


class _Traced:
    """The first stage's results for a region, from which each plan gets copies of the graphs."""

    def __init__(self, first: FirstStage, around: Callable[[Any], AbstractContextManager[Any]]) -> None:
        self._first, self._around = first, around
        self.sizes: Sizes | None = None  # for which the graphs are lowered, if not for those of the trace
        self._joint: fx.GraphModule | None = None  # with symbolic sizes
        if first.needs_autograd and has_sizes(first.graph.graph):
            self._joint = _copied(first.graph)
        self._partitions: tuple[fx.GraphModule, ...] = ()  # forward and backward, once the joint graph is partitioned

    def resized(self, sizes: Sizes) -> _Traced:
        """Return the same trace, whose graphs are lowered for ``sizes``."""
        other = copy.copy(self)
        other.sizes, other._partitions = sizes, ()
        return other

    def compile(self, of: Variant) -> BoxedFunction:
        """Run the second stage for one variant."""

        def partition(joint: fx.GraphModule, inputs: Any, **given: Any) -> tuple[fx.GraphModule, ...]:
            if not self._partitions:
                whole = joint
                if not joint.graph.nodes:
                    assert self._joint is not None
                    whole = _copied(self._joint)
                sizes = {} if self.sizes is None else {"sizes": self.sizes}
                self._partitions = self._first.partition(whole, inputs, **sizes, **given)
                self._first.drop_graph()
            forward, backward = partitions = tuple(_copy_for(of, half) for half in self._partitions)
            of.edit((SegmentGraph(forward, "forward", given["num_fwd_outputs"]), SegmentGraph(backward, "backward", 0)))
            return partitions

        graph = self._first.graph
        with stage("compiling"):
            return self._first.run_second_stage(
                graph if self._first.needs_autograd else _copy_for(of, graph), partition
            )

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Restore the context of the second stage after torch has left AOTAutograd."""
        with self._first.resumed(), self._around(self._first.fake_mode):
            yield


def _copy_for(of: Variant, graph: fx.GraphModule) -> fx.GraphModule:
    copied = _copied(graph)
    copied.meta[_VARIANT_KEY] = of
    return copied


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    copied, _ = copy_module(graph)
    copied.meta.update(graph.meta)
    return copied
