"""Captures a region with dynamic sizes once for all sizes, with plans for those that need swaps, or for each call's.

When an input has a second size Dynamo traces one graph for all sizes. A byte budget needs numbers: the graph is lowered
and planned for those of one call, or for the largest of their bucket. A plan that moves nothing serves all sizes whose
step fits the budget unchanged, one that moves tensors those of its bucket, and smaller ones until a plan of their own
pays; both run with the sizes of each call. For other buckets the trace is lowered and planned again. Where a region
cannot be traced so, each kind of call has a trace.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import fx

from lmswap.capture.interrupts import raise_interrupt
from lmswap.torch_compat.dynamo import SkipFrame
from lmswap.torch_compat.sized_graphs import replace_by_number
from lmswap.torch_compat.symbolic_sizes import RegionSizes, Sizes, SymbolicRegion, is_symbolic, traced_number
from lmswap.torch_compat.tensors import storage_id
from lmswap.torch_compat.tracing import FakeTensor, FakeTensorMode, ShapeEnv, TracingContext, tracing

# By position of a tensor: the first argument that is this tensor, and the first in its storage.
Aliases = Mapping[int, tuple[int, int]]
_MAX_SERVED = 1024  # kinds of calls that are known to be served: numbers may be new in each step


class SizesOutgrown(Exception):
    """The plan of a capture does not serve the sizes of a call."""


class NotSymbolic(Exception):
    """A region cannot be captured with symbolic sizes."""


class Captured(Protocol):
    """What runs in place of a region."""

    @property
    def unmoved_bytes(self) -> int:
        """Bytes that the largest sizes that its plan serves take if nothing is moved."""

    def __call__(self, *arguments: Any, sizes: Sizes | None = None) -> Any:
        """Return the region's results for ``arguments`` of ``sizes``.

        Raises:
            SizesOutgrown: its plan does not serve ``sizes``; nothing has run.
        """

    def for_sizes(self, sizes: Sizes, entry: Eviction) -> Captured:
        """Return the same with a plan that serves ``sizes``; ``entry`` evicts it."""


class Capture(Protocol):
    """Captures a region."""

    def __call__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        given: Sequence[Any],
        symbolic: SymbolicRegion | None,
        entry: Eviction,
    ) -> Captured:
        """Return what runs in place of ``module``.

        Raises:
            NotSymbolic: it failed, with symbolic sizes.
            SkipFrame: it failed; the model's own code is to run.

        Args:
            module: the region.
            inputs: of the trace.
            given: the arguments of the call.
            symbolic: the region with symbolic sizes; None: all are constants.
            entry: evicts what is returned.
        """


def has_dynamic_sizes(region: fx.GraphModule, *, takes_floats: bool) -> bool:
    """Return whether Dynamo's graph of a region takes numbers, besides tensors, that have to be constants of a plan.

    ``takes_floats``: floats do not.
    """
    given = [node.meta.get("example_value") for node in region.graph.find_nodes(op="placeholder")]
    return any(is_symbolic(value) and not (takes_floats and isinstance(value, torch.SymFloat)) for value in given)


def specialize(
    region: fx.GraphModule,
    inputs: Sequence[Any],
    capture: Capture,
    *,
    keeps_symbols: bool,
    max_captures: int | None,
    at_limit: Callable[[], None],
) -> Callable[..., Any]:
    """Return a function that runs ``region`` by captures made by ``capture``, the first one now if ``inputs`` are real.

    Args:
        region: Dynamo's graph, with symbolic sizes.
        inputs: its inputs in the first call.
        capture: see `Capture`.
        keeps_symbols: a capture may serve other sizes than those of its first call.
        max_captures: beyond them ``at_limit`` is called, and ``region`` runs as it is.
        at_limit: see above.
    """
    dynamic = _DynamicRegion(region, capture, keeps_symbols=keeps_symbols, max_captures=max_captures, at_limit=at_limit)
    if not any(isinstance(value, FakeTensor) for value in inputs):
        dynamic.prepare([traced_number(value) for value in inputs])
    return dynamic.run


class SizedEntry:
    """One capture of a region, for calls of some kinds."""

    def __init__(self, aliases: Aliases) -> None:
        self.aliases = aliases
        self.function: Callable[..., Any]
        self.symbolic: SymbolicRegion | None = None
        self.places: Sequence[int] | None = None  # of the arguments that ``function`` takes; None: of all

    def for_sizes(self, sizes: Sizes, evicting: Callable[[SizedEntry], Eviction]) -> SizedEntry:
        """Return another one by the same trace, with a plan that serves ``sizes``."""
        captured: Captured = self.function  # type: ignore[assignment]
        other = SizedEntry(self.aliases)
        other.symbolic, other.function = self.symbolic, captured.for_sizes(sizes, evicting(other))
        return other

    @property
    def unmoved_bytes(self) -> int:
        """See `Captured`."""
        captured: Captured = self.function  # type: ignore[assignment]
        return captured.unmoved_bytes

    def run(self, arguments: Sequence[Any], sizes: Sizes | None) -> Any:
        """Return the region's results.

        Raises:
            SizesOutgrown: its plan does not serve ``sizes``; nothing has run.
        """
        if self.places is not None:
            return self.function(*(arguments[place] for place in self.places))
        return self.function(*arguments, sizes=sizes)


class Eviction:
    """Forgets one capture of a region, without holding it: it holds the graph whose eviction this is."""

    def __init__(self, owner: _DynamicRegion, entry: SizedEntry) -> None:
        self._owner, self._entry = weakref.ref(owner), weakref.ref(entry)

    def evict(self) -> bool:
        """Forget the capture, so that the next call of its kinds is captured again; whether it was known."""
        owner, entry = self._owner(), self._entry()
        if owner is None or entry is None:
            return False
        owner.forget(entry)
        return True


class _DynamicRegion:
    def __init__(
        self,
        region: fx.GraphModule,
        capture: Capture,
        *,
        keeps_symbols: bool,
        max_captures: int | None,
        at_limit: Callable[[], None],
    ) -> None:
        self._region, self._capture, self._keeps_symbols = region, capture, keeps_symbols
        self._max_captures, self._at_limit = max_captures, at_limit
        self._sizes = RegionSizes(region)
        self._captured_for: dict[Hashable, SizedEntry] = {}  # by kind of call
        self._served: dict[Hashable, SizedEntry] = {}  # likewise, of other sizes
        self._entries: list[SizedEntry] = []

    def prepare(self, arguments: Sequence[Any]) -> None:
        aliases = _aliases(arguments)
        sizes = self._sizes_of(arguments)
        self._captured_for[_kind(arguments, aliases, sizes)] = self._capture_for(arguments, aliases, sizes)

    def run(self, *arguments: Any) -> Any:
        aliases = _aliases(arguments)
        sizes = self._sizes_of(arguments)
        kind = _kind(arguments, aliases, sizes)
        for known in (self._captured_for, self._served):
            if (entry := known.get(kind)) is not None:
                try:
                    return entry.run(arguments, sizes)
                except SizesOutgrown:
                    known.pop(kind, None)
        for entry in self._serving(aliases, sizes):
            if entry not in self._entries:  # evicted since
                continue
            if len(self._served) >= _MAX_SERVED:
                self._served.clear()
            self._served[kind] = entry
            try:
                return entry.run(arguments, sizes)
            except SizesOutgrown:
                self._served.pop(kind, None)
        entry = self._captured_for[kind] = self._capture_or_region(arguments, aliases, sizes)
        return entry.run(arguments, sizes)

    def _sizes_of(self, arguments: Sequence[Any]) -> Sizes | None:
        """Return the sizes of a call; None if a capture cannot serve others."""
        return self._sizes.of(arguments) if self._keeps_symbols else None

    def _serving(self, aliases: Aliases, sizes: Sizes | None) -> list[SizedEntry]:
        """Return the captures of other sizes whose trace holds for a call, those for the smallest sizes first."""
        if sizes is None:
            return []
        traces = {entry.symbolic for entry in self._entries if entry.symbolic is not None and entry.aliases == aliases}
        holding = {trace for trace in traces if trace.serves(sizes)}
        serving = [entry for entry in reversed(self._entries) if entry.symbolic in holding]
        return sorted(serving, key=lambda entry: entry.unmoved_bytes)

    def forget(self, entry: SizedEntry) -> None:
        self._entries = [other for other in self._entries if other is not entry]
        self._captured_for = {kind: other for kind, other in self._captured_for.items() if other is not entry}
        self._served.clear()

    def _capture_for(self, arguments: Sequence[Any], aliases: Aliases, sizes: Sizes | None) -> SizedEntry:
        if sizes is None:
            return self._captured(arguments, aliases, None)
        if serving := self._serving(aliases, sizes):
            entry = serving[0].for_sizes(sizes, lambda entry: Eviction(self, entry))
            self._entries.append(entry)  # now: others may have been evicted
            return entry
        try:
            return self._captured(arguments, aliases, sizes)
        except NotSymbolic:
            self._keeps_symbols = False
        return self._captured(arguments, aliases, None)

    def _capture_or_region(self, arguments: Sequence[Any], aliases: Aliases, sizes: Sizes | None) -> SizedEntry:
        """Return a capture, or the region as Dynamo has it: its trace, which has ended, cannot skip it any more."""
        if self._max_captures is None or len(self._entries) < self._max_captures:
            with suppress(SkipFrame):
                return self._capture_for(arguments, aliases, sizes)
        else:
            self._at_limit()
        entry = SizedEntry(aliases)
        entry.function, entry.places = self._region, range(len(arguments))
        return entry

    def _captured(self, arguments: Sequence[Any], aliases: Aliases, sizes: Sizes | None) -> SizedEntry:
        entry = SizedEntry(aliases)
        if sizes is None:
            fake_mode = FakeTensorMode(shape_env=ShapeEnv())
            module, entry.places = _with_numbers(self._region, arguments, fake_mode)
            inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        else:
            entry.symbolic = self._symbolic(arguments, sizes)
            module, inputs, fake_mode = entry.symbolic.module, entry.symbolic.inputs, entry.symbolic.fake_mode
        given = arguments if entry.places is None else [arguments[place] for place in entry.places]
        with tracing(TracingContext(fake_mode)):
            entry.function = self._capture(module, inputs, given, entry.symbolic, Eviction(self, entry))
        self._entries.append(entry)
        return entry

    def _symbolic(self, arguments: Sequence[Any], sizes: Sizes) -> SymbolicRegion:
        try:
            return SymbolicRegion(self._region, arguments, sizes)
        except Exception as error:  # torch's own, of any kind
            raise_interrupt(error)
            raise NotSymbolic from error


def _kind(arguments: Sequence[Any], aliases: Aliases, sizes: Sizes | None) -> Hashable:
    """Return what a capture is for: sizes, and which arguments share memory; without ``sizes``, each number."""
    geometry = (
        (argument.shape, argument.stride(), argument.storage_offset())
        if isinstance(argument, torch.Tensor)
        else argument
        for argument in arguments
        if sizes is None or not isinstance(argument, float)
    )
    return tuple(geometry), tuple(aliases.values())


def _aliases(arguments: Sequence[Any]) -> Aliases:
    """Return which arguments share memory: on that a graph depends besides Dynamo's guards."""
    first: dict[int, int] = {}  # by tensor and by storage: the position of its first argument
    return {
        place: (first.setdefault(id(argument), place), first.setdefault(storage_id(argument.untyped_storage()), place))
        for place, argument in enumerate(arguments)
        if isinstance(argument, torch.Tensor)
    }


def _with_numbers(
    region: fx.GraphModule, arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[int]]:
    """Return a copy of ``region`` for the sizes of ``arguments``, and the positions of the tensors among them."""
    fixed, places = copy.deepcopy(region), []
    inputs = fixed.graph.find_nodes(op="placeholder")
    for place, (node, argument) in enumerate(zip(inputs, arguments, strict=True)):
        if isinstance(argument, torch.Tensor):
            node.meta["example_value"] = fake_mode.from_tensor(argument, static_shapes=True)
            places.append(place)
        else:
            replace_by_number(node, argument)
            fixed.graph.erase_node(node)
    fixed.recompile()
    return fixed, places
