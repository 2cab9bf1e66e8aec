"""Splits AOTAutograd's work on a region: the first stage, tracing, runs once, the second for each plan.

The first stage traces forward and backward together, which takes longer than all else but the search for a plan. The
second partitions them, has both compiled, and builds what autograd runs; it needs the graphs, which are edited for the
plan, and its description of the region, which it modifies. Both are kept as the first stage returned them, and each
plan gets copies::

    Dynamo's graph ──► first stage ──► forward, backward ──► copies, edited ──► second stage ──► compiled region
                                                        └──► copies, edited ──► second stage ──► … for another plan
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile
from torch._functorch._aot_autograd.schemas import (
    AOTGraphCapture,
    AOTState,
    SubclassCreationMeta,
    SubclassMeta,
    ViewAndMutationMeta,
)
from torch._guards import TracingContext, tracing

from lmswap.capture.log_filter import suppress_failure_warnings
from lmswap.execute.codegen import BoxedFunction, copy_module
from lmswap.progress import stage

_VARIANT = "lmswap_variant"  # in the meta of a graph
_WRITTEN_ON = (ViewAndMutationMeta, SubclassMeta, SubclassCreationMeta)


class Variant(Protocol):
    """A region as compiled for one plan: edits its graphs, which refer to it by `variant`."""

    def edit(self, forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> None:
        """Edit the two graphs of a training step in place, before torch's compilers get them."""

    def run(self, compiled: BoxedFunction, arguments: Sequence[Any]) -> Any:
        """Run the region by what torch ``compiled`` of the graphs."""

    def __deepcopy__(self, _: object) -> Variant:
        return self  # torch copies backward graphs before it compiles them


def variant(graph: fx.GraphModule) -> Any:
    """Return the `Variant` of a graph passed to torch's compilers."""
    return graph.meta[_VARIANT]


class Compiled:
    """A region compiled for one plan, callable in its place."""

    def __init__(self, traced: _Traced, new: Callable[[Any], Variant], handler: Any) -> None:
        self._traced, self._new, self._variant = traced, new, new(handler)
        self._compiled = traced.compile(self._variant)

    def __call__(self, *arguments: Any) -> Any:
        """Return the region's results for ``arguments``."""
        return self._variant.run(self._compiled, arguments)

    def compile_again(self, handler: Any) -> Compiled:
        """Return the region compiled for another plan, of ``handler``, without another trace.

        It may be called from anywhere. Neither result holds the other.
        """
        with self._traced.resumed():
            return Compiled(self._traced, self._new, handler)


def trace_once(
    compile_region: Callable[[], Any],
    new: Callable[[Any], Variant],
    handler: Any,
    around: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext(),
) -> Compiled:
    """Run ``compile_region``, which calls AOTAutograd once, and return the region compiled for the first plan.

    Args:
        compile_region: its result is discarded.
        new: makes the variant of a handler.
        handler: that of the first plan.
        around: returns the context that the compilers need besides a tracing context, from the fake mode.
    """
    made: list[Compiled] = []
    thread = threading.get_ident()

    def second_stage(state: AOTState, capture: AOTGraphCapture, *compilers: Any) -> tuple[Any, Any]:
        if threading.get_ident() != thread:  # Dynamo lets one thread compile, but others may use AOTAutograd itself
            return aot_stage2_compile(state, capture, *compilers)
        catching.stop()  # Inductor's compilers trace patterns in two stages, too
        made.append(Compiled(_Traced(state, capture, compilers, around), new, handler))
        return made[0], state.fw_metadata

    catching = mock.patch.object(aot_autograd, "aot_stage2_compile", second_stage)
    catching.start()
    try:
        with suppress_failure_warnings():
            compile_region()
    finally:
        catching.stop()
    (compiled,) = made
    return compiled


class _Traced:
    """The first stage's results for a region, and its compilers; of its tensors only constants of the code are real."""

    def __init__(
        self,
        state: AOTState,
        capture: AOTGraphCapture,
        compilers: Sequence[Any],
        around: Callable[[Any], AbstractContextManager[Any]],
    ) -> None:
        self._state, self._capture, self._around = state, capture, around
        self._cut, *self._compilers = compilers
        self._halves: tuple[fx.GraphModule, ...] = ()  # forward and backward, once they are cut apart
        self._fake_mode: Any = TracingContext.get().fake_mode
        self._is_cast = torch._C._is_any_autocast_enabled()

    def compile(self, of: Variant) -> BoxedFunction:
        """Run the second stage for one variant."""

        def cut(joint: fx.GraphModule, inputs: Any, **given: Any) -> tuple[fx.GraphModule, ...]:
            if joint.graph.nodes:
                self._halves = self._cut(joint, inputs, **given)
                self._capture = replace(self._capture, graph_module=fx.GraphModule({}, fx.Graph()))  # consumed
            forward, backward = halves = tuple(_copy_for(of, half) for half in self._halves)
            of.edit(forward, backward, given["num_fwd_outputs"])
            return halves

        state = replace(self._state, fw_metadata=_own(self._state.fw_metadata))
        graph = self._capture.graph_module
        capture = replace(
            self._capture,
            graph_module=graph if state.needs_autograd else _copy_for(of, graph),
            updated_flat_args=_own(self._capture.updated_flat_args),
            maybe_subclass_meta=_own(self._capture.maybe_subclass_meta),
        )
        with stage("compiling"):
            compiled, _ = aot_stage2_compile(state, capture, cut, *self._compilers)
        return compiled

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Restore the context of the second stage after torch has left AOTAutograd.

        It reads whether autocast is enabled, so that results are not cast twice; another graph may be about to run.
        """
        autocast = torch.autocast("cpu", enabled=self._is_cast)
        with autocast, tracing(TracingContext(self._fake_mode)), self._fake_mode, self._around(self._fake_mode):
            yield


def _copy_for(of: Variant, graph: fx.GraphModule) -> fx.GraphModule:
    copied, _ = copy_module(graph)
    copied.meta.update(graph.meta | {_VARIANT: of})
    return copied


def _own(part: Any) -> Any:
    """Return a copy of ``part`` down to what the second stage does not modify; fakes cannot be copied."""
    if type(part) in (list, tuple):
        return type(part)(map(_own, part))
    if type(part) is dict:
        return {name: _own(value) for name, value in part.items()}
    if not isinstance(part, _WRITTEN_ON):
        return part
    own = copy.copy(part)
    vars(own).update(_own(vars(part)))
    return own
