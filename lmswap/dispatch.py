"""Dispatches calls of an enabled model to captured graphs or to saved-tensor hooks.

A call uses torch.compile first. If that captured nothing, or ops outside of its graphs saved tensors that are large
enough to swap, the hooks of `lmswap.saved_tensors` serve the whole model from the next call on, and the report
states the reason. Graph breaks without large tensors between them stay graphs. Calls without gradients use neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lmswap.call_monitor import CALL_MONITOR
from lmswap.capture.aot import refuse_graph_rewriters
from lmswap.capture.numerics.global_state import GlobalState
from lmswap.capture.numerics.is_compiling import describe_is_compiling_calls
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.capture.recompiles import (
    CompiledCall,
    Recompiles,
    TraceFailed,
    TracesWithoutGradients,
)
from lmswap.capture.tensor_subclass import call_unwrapped, torch_function_tensors
from lmswap.errors import ManyTraces, NotManaged, OptionError
from lmswap.frames import shortened
from lmswap.module_checks import check_swappable
from lmswap.progress import reported
from lmswap.saved_tensors.hooks import hooks_disabled_reason
from lmswap.saved_tensors.step import HookedStep, LazyHookedStep
from lmswap.session.diagnostics import warn
from lmswap.session.engine_setup import WHAT_VERIFY_DOES
from lmswap.session.hooked_calls import HookedCalls
from lmswap.session.session import UNPLANNED, Session
from lmswap.torch_compat.autograd import peek_interpreter_stack
from lmswap.torch_compat.dynamo import (
    describe_graph_break,
    describe_untraceable,
    graph_break_reasons,
    untraceable_code,
    untraced,
)
from lmswap.torch_compat.modules import eager_call, own_tensors
from lmswap.torch_compat.pytree import tensors
from lmswap.torch_compat.tracing import clear_fake_cache

_SUMMED_BY_GRAPH = (
    f"{ROUNDED_OTHERWISE}: a step runs several graphs, and the gradient of what more than one of them uses is summed "
    "graph by graph"
)

_UNTRACED_CALLS = (
    "calls without gradients differ too often to trace each, as in generate() with its cache: such a call runs as in "
    "plain torch, fetches non-resident weights as it reads them, and is not planned"
)


class ModelCall:
    """Runs in place of an enabled model's `__call__`."""

    def __init__(self, model: nn.Module, session: Session, *, instead_of: Callable[..., Any] | None) -> None:
        """``instead_of`` is what a call of ``model`` ran, if it was compiled; `lmswap.disable` restores it."""
        self.instead_of = instead_of
        self._model, self._session, self._own = model, session, session.recorder.own
        self._outputs = session.budget.earlier_outputs
        self._plain: Callable[..., Any] = eager_call(model)
        self.hooked = HookedCalls(model, session)
        self._inside, self._was_called = threading.local(), False
        self._first_parameter = _first_parameter(model)
        self._recompiles, self._without_gradients = Recompiles(session.name), TracesWithoutGradients()
        self._traced_in: GlobalState | None = None
        self._compiled: CompiledCall | None = None
        if session.options.compiler == "eager":
            session.notes.append('path: saved-tensor hooks for the whole model, as requested by compiler="eager"')
        else:
            self._compiled = CompiledCall(
                model,
                session,
                takes_floats=session.runs_uncaptured,
                at_limit=session.reach_trace_limit,
                before_trace=session.make_room_to_trace,
                sizes_may_vary=lambda: (
                    session.may_share_plans and self._recompiles.sizes_may_vary(self._inside.shapes())
                ),
            )

    def close(self) -> None:
        """Drop the graphs, which refer to this object: so the model is freed as soon as nothing refers to it."""
        self._compiled = None

    @property
    def is_running(self) -> bool:
        """Whether a call is under way in this thread."""
        return getattr(self._inside, "is_running", False)

    @untraced  # also if the calling code is compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs; see `nn.Module.__call__`."""
        if self.is_running:  # the model calls itself
            return self._plain(*args, **kwargs)
        self._own.begin_call()
        if wrapped := torch_function_tensors(args, kwargs):
            return call_unwrapped(self, wrapped, args, kwargs)
        self._session.check_caller()
        if not (torch.is_grad_enabled() or self._is_planned_without_gradients(args, kwargs)):
            return self._call_without_gradients(args, kwargs)
        if not self._was_called:
            if self._session.weights.is_managed:
                check_swappable([*self._model.parameters()], self._session.name)  # sharded since it was enabled
            self._was_called = True
        CALL_MONITOR.count_call(self._model)
        if (place := _unmanageable_place()) is not None:
            return self._call_unmanaged(place, args, kwargs)
        self.hooked.hooks.pop_leftovers()
        refuse_graph_rewriters()
        if self._session.leaves_graphs and self._compiled is not None:
            self._end_graphs()
        self._check_device()
        try:  # no context: a signal could arrive as it exits
            self._inside.is_running = True
            self._check_global_state()
            self._outputs.begin_call()
            if self._compiled is None:
                result = self.hooked.run(self._plain, args, kwargs)
            else:
                result = self._call_captured(self._compiled, args, kwargs)
            self._outputs.end_call(result)
            return result
        except Exception as error:
            raise shortened(error)  # noqa: B904 - itself
        finally:
            self._inside.is_running, self._inside.shapes = False, None
            self._own.end_call()

    def _check_global_state(self) -> None:
        """Switch to hooks for good if the graphs were traced under another global state."""
        if self._compiled is None:
            return
        around = GlobalState.now()
        if self._traced_in is None:
            self._traced_in = around
        elif around != self._traced_in:
            ops = (op.target for program in self._session.programs() for op in program.ops)
            reason = around.changed(self._traced_in, ops)
            if reason is not None:
                self._leave_graphs(reason)

    def _check_device(self) -> None:
        of_module, name = self._first_parameter
        if (parameter := of_module.get(name)) is None:
            self._first_parameter = of_module, name = _first_parameter(self._model)
            parameter = of_module[name]
        session, lies_on = self._session, parameter.device
        if lies_on != session.device:
            raise OptionError(
                f"{session.name} was enabled on {session.device} and lies on {lies_on} now: move it first, and then "
                "call lmswap.enable"
            )

    def _call_captured(self, compiled: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graphs; hooks serve what is saved outside of them, which decides the path of the next calls."""
        session, num_breaks = self._session, len(graph_break_reasons)
        num_captured, is_first = session.num_captured, not session.graphs
        kind = self.hooked.kind(args, kwargs) if is_first else None
        untraceable = untraceable_code() if is_first else None
        outside = LazyHookedStep(lambda: self.hooked.begin_step(None, kind, args, kwargs, records=is_first))
        if is_first:
            outside.begin()
        hooks = outside.pack, outside.unpack
        had_run = session.recorder.num_steps, session.recorder.current_sequence
        failure: str | None = None
        try:
            with (
                reported(f"{session.name}, first call", "tracing") if is_first else nullcontext(),
                self.hooked.hooks.on(*hooks),
            ):
                self._own.seconds += perf_counter()
                self._inside.shapes = lambda: _shapes(args, kwargs)
                result = compiled(*args, **kwargs)
                self._own.seconds -= perf_counter()
        except TraceFailed as error:
            if had_run != (session.recorder.num_steps, session.recorder.current_sequence):
                raise error.error from None  # what has run must not run a second time
            failure = str(error)
        if failure is not None:
            with self.hooked.hooks.on(*hooks):
                result = self._plain(*args, **kwargs)  # raises the error of torch without tracing
        if compiled.is_compiling_calls and session.graphs:
            session.flag_is_compiling(describe_is_compiling_calls(compiled.is_compiling_calls))
            compiled.is_compiling_calls.clear()
        self._count_trace(args, kwargs, is_traced=session.num_captured > num_captured)
        sequence = session.recorder.current_sequence
        if len(sequence) > 1 and len({graph for graph, phase in sequence if phase == "forward"}) > 1:
            session.note_on_graphs(_SUMMED_BY_GRAPH)
        if outside.step is not None:
            reasons = [describe_graph_break(reason) for reason in graph_break_reasons[num_breaks:]]
            if failure is not None:
                reasons.append(failure)
            elif untraceable is not None and not reasons:
                reasons = describe_untraceable(untraceable)
            self._choose_path(outside.step, reasons)
            outside.step.end_forward()
        return result

    def _count_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_traced: bool) -> None:
        """Count the traces of a call that has run; warn once there are many for training."""
        if is_traced:
            clear_fake_cache()
        if not torch.is_grad_enabled():
            self._without_gradients.add(self.hooked.kind(args, kwargs), is_traced=is_traced)
        elif is_traced:
            warning = self._recompiles.add(_shapes(args, kwargs))
            if warning is not None:
                warn(warning, ManyTraces)

    def _choose_path(self, step: HookedStep, reasons: list[str]) -> None:
        """Keep graphs or switch to hooks for the next calls, by what ``step`` saved outside of graphs."""
        session = self._session
        if session.graphs:
            step.recording = None  # it lacks what the graphs saved
        if not session.leaves_graphs and (step.num_storages or not session.graphs):
            what = "it captured no part of the model"
            if session.graphs:
                what = f"{step.num_storages} large tensors were saved outside of its graphs"
            self._leave_graphs(f"{what}: {'; '.join(dict.fromkeys(reasons)) or 'TORCH_LOGS=graph_breaks shows why'}")

    def _is_planned_without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether graphs serve this call without gradients; in eager mode it saves nothing to swap, but has weights."""
        if not self._session.weights.is_managed:
            return False
        is_admitted = self._without_gradients.admits(self.hooked.kind(args, kwargs))
        if not is_admitted:
            self._session.note_once(_UNTRACED_CALLS)
        return is_admitted

    def _call_without_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model in eager mode: it saves nothing to swap, and the number of traces is limited."""
        if getattr(self._inside, "runs_without_gradients", False):  # the model calls itself
            return self._plain(*args, **kwargs)
        session = self._session
        session.prepare(None)
        session.engine.release_cached()
        self._own.end_call()
        try:
            self._inside.runs_without_gradients = True  # a call with gradients inside of it is managed
            with session.recorder.segment((UNPLANNED, "inference"), tuple), self.hooked.reading("inference"):
                return self._plain(*args, **kwargs)
        finally:
            self._inside.runs_without_gradients = False

    def _call_unmanaged(self, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model in eager mode ``where`` neither graphs nor hooks can serve it, and warn once."""
        note = (
            f"{self._session.name} was called {where}: such calls are not managed, and take as much memory as without "
            "lmswap"
        )
        if note not in self._session.notes:
            self._session.notes.append(note)
            warn(note, NotManaged)
        try:
            self._inside.is_running = True
            self._own.end_call()
            return self._plain(*args, **kwargs)
        finally:
            self._inside.is_running = False

    def _leave_graphs(self, why: str) -> None:
        self._session.leave_graphs(why)
        self._end_graphs()

    def _end_graphs(self) -> None:
        self._compiled = None
        self._session.left_graphs()
        if self._session.options.verify:
            self._session.notes.append(WHAT_VERIFY_DOES["eager"])


def _first_parameter(model: nn.Module) -> tuple[Mapping[str, Any], str]:
    """Return where the model's first parameter is: the parameters of its module, and its name there."""
    return next(
        (parameters, name)
        for module in model.modules()
        for parameters, _ in (own_tensors(module),)
        for name, parameter in parameters.items()
        if parameter is not None
    )


def _shapes(args: Any, kwargs: Any) -> Hashable:
    return tuple(tensor.shape for tensor in tensors((args, kwargs)))


def _unmanageable_place() -> str | None:
    """Return where the model is called now, if neither graphs nor hooks can serve it there."""
    if peek_interpreter_stack() is not None:
        return "under a transform of torch.func (grad, vmap, jvp ...)"
    if (message := hooks_disabled_reason()) is not None:
        return f'where saved-tensor hooks are disabled ("{message}")'
    return None
