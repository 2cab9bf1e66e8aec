"""What does torch do once for a region that Dynamo captured, and what for each plan? It traces once.

AOTAutograd works in two stages. The first traces forward and backward together, which takes longer than all else but
the search for a plan. The second cuts them apart, has both compiled, and makes of them what autograd runs; it needs the
graphs, which are edited for the plan, and its description of the region, which it writes on. Both are kept as the first
stage left them, and each plan gets copies::

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

from lmswap.capture.fakes import unwarned_failures
from lmswap.execute.graph import BoxedFunction, copy_module
from lmswap.waiting import stage

_VARIANT = "lmswap_variant"  # in the meta of a graph
_WRITTEN_ON = (ViewAndMutationMeta, SubclassMeta, SubclassCreationMeta)


class Variant(Protocol):
    """A region as one plan has it: what is done with its graphs, which lead here by `variant`."""

    def edit(self, forward: fx.GraphModule, backward: fx.GraphModule, num_user_outputs: int) -> None:
        """Edits the two graphs of a training step, in place; torch's compilers get them next."""

    def run(self, compiled: BoxedFunction, arguments: Sequence[Any]) -> Any:
        """Runs the region by what torch ``compiled`` of the graphs."""

    def __deepcopy__(self, _: object) -> Variant:
        return self  # torch copies backward graphs before it compiles them


def variant(graph: fx.GraphModule) -> Any:
    """The `Variant` that a graph is of which torch's compilers are given."""
    return graph.meta[_VARIANT]


class Compiled:
    """A region that was compiled for one plan: what runs instead of it."""

    def __init__(self, traced: _Traced, new: Callable[[Any], Variant], handler: Any) -> None:
        self._traced, self._new, self._variant = traced, new, new(handler)
        self._compiled = traced.compile(self._variant)

    def __call__(self, *arguments: Any) -> Any:
        """What the region gives for ``arguments``."""
        return self._variant.run(self._compiled, arguments)

    def again(self, handler: Any) -> Compiled:
        """The same region for the plan of another ``handler``, or another plan of the same; nothing is traced.

        It may be called from anywhere. Neither holds the other.
        """
        with self._traced.resumed():
            return Compiled(self._traced, self._new, handler)


def trace_once(
    compile_region: Callable[[], Any],
    new: Callable[[Any], Variant],
    handler: Any,
    around: Callable[[Any], AbstractContextManager[Any]] = lambda _: nullcontext(),
) -> Compiled:
    """Runs ``compile_region``, which calls AOTAutograd once.

    Args:
        compile_region: what it gives is not needed.
        new: makes the variant of a handler.
        handler: that of the first plan.
        around: what the compilers need around them beside a tracing context, by the fake mode, when torch's is gone.
    """
    made: list[Compiled] = []
    thread = threading.get_ident()

    def second_stage(state: AOTState, capture: AOTGraphCapture, *compilers: Any) -> tuple[Any, Any]:
        if threading.get_ident() != thread:  # Dynamo lets one thread compile, but others may use AOTAutograd itself
            return aot_stage2_compile(state, capture, *compilers)
        catching.stop()  # Inductor's compilers trace patterns of theirs in two stages, too
        made.append(Compiled(_Traced(state, capture, compilers, around), new, handler))
        return made[0], state.fw_metadata

    catching = mock.patch.object(aot_autograd, "aot_stage2_compile", second_stage)
    catching.start()
    try:
        with unwarned_failures():
            compile_region()
    finally:
        catching.stop()
    (compiled,) = made
    return compiled


class _Traced:
    """What the first stage made of a region, and its compilers; no tensor in it is real but constants of the code."""

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
        """Runs the second stage for one variant."""

        def cut(joint: fx.GraphModule, inputs: Any, **given: Any) -> tuple[fx.GraphModule, ...]:
            if joint.graph.nodes:
                self._halves = self._cut(joint, inputs, **given)
                self._capture = replace(self._capture, graph_module=fx.GraphModule({}, fx.Graph()))  # it is cut up
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
        """Lets the second stage run when torch has long left AOTAutograd.

        It asks whether autocast is on, for what runs is to be cast no more; another graph may be about to run.
        """
        autocast = torch.autocast("cpu", enabled=self._is_cast)
        with autocast, tracing(TracingContext(self._fake_mode)), self._fake_mode, self._around(self._fake_mode):
            yield


def _copy_for(of: Variant, graph: fx.GraphModule) -> fx.GraphModule:
    copied, _ = copy_module(graph)
    copied.meta.update(graph.meta | {_VARIANT: of})
    return copied


def _own(part: Any) -> Any:
    """A copy of ``part`` down to what the second stage leaves as it is; fakes cannot be copied."""
    if type(part) in (list, tuple):
        return type(part)(map(_own, part))
    if type(part) is dict:
        return {name: _own(value) for name, value in part.items()}
    if not isinstance(part, _WRITTEN_ON):
        return part
    own = copy.copy(part)
    vars(own).update(_own(vars(part)))
    return own
