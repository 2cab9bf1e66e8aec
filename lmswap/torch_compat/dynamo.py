"""Dynamo, which captures graphs from Python code: errors, settings, handlers of functions, and the compiled call."""

from __future__ import annotations

import inspect
import re
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo import OptimizedModule, config, convert_frame, guards, trace_rules, utils
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    RestartAnalysis,
    SkipFrame,
    TorchDynamoException,
)
from torch._dynamo.external_utils import is_compiling, wrap_inline
from torch._dynamo.repro.after_dynamo import WrapBackendDebug
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons
from torch._dynamo.variables import ConstantVariable, TensorVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable

__all__ = [
    "BackendCompilerFailed",
    "ConstantVariable",
    "OptimizedModule",
    "RestartAnalysis",
    "SkipFrame",
    "graph_break_reasons",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint  # as which `torch.utils.checkpoint` is captured
IS_COMPILING = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch._utils.is_compiling,
    is_compiling,
)
# Dynamo answers "yes", where eager mode runs attention without gradients as one operator (by design, pytorch#164721).
IS_MAKE_FX_TRACING = torch.nn.modules.activation._is_make_fx_tracing
# What torch calls in graphs in place of NumPy.
NUMPY_WRAPPERS = (utils.numpy_to_tensor_wrapper, utils.numpy_method_wrapper, utils.numpy_operator_wrapper)
# The setting that keeps Dynamo from decomposing functions (pytorch#170131), where torch has it.
NO_DECOMPOSITIONS = {name: False for name in ("enable_dynamo_decompositions",) if hasattr(config, name)}


@contextmanager
def settings(values: Mapping[str, Any]) -> Iterator[None]:
    """Set values of Dynamo's configuration for the duration; its own ``patch`` would create a class in each call."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextmanager
def untimed_guards() -> Iterator[None]:
    """Do not time guards: to log their times torch (2.11 to 2.13) flushes the CPU's caches after each trace.

    That takes 31 ms and, of a budget, 32 MiB (pytorch#154764 introduced it).
    """
    in_guards = vars(guards)
    time_guards = in_guards["profile_guard_manager"]
    try:
        in_guards["profile_guard_manager"] = lambda *_: 0.0
        yield
    finally:
        in_guards["profile_guard_manager"] = time_guards


@contextmanager
def replaced_handlers(functions: Iterable[object], handle: Callable[..., Any]) -> Iterator[None]:
    """Call ``handle`` where Dynamo captures a call of one of ``functions`` that it handles specially.

    Args:
        functions: those without a handler in the installed torch are ignored.
        handle: gets torch's handler, the function as a variable, the tracer, and the call's arguments; what it returns
            is the call's result, or None to capture the call itself.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()
    originals = {function: handlers[function] for function in functions if function in handlers}

    def replacement(function: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        return handle(originals[function.value], function, tracer, *args, **kwargs)

    handlers.update(dict.fromkeys(originals, replacement))
    try:
        yield
    finally:
        handlers.update(originals)


@contextmanager
def observed_checkpoints(observe: Callable[[fx.Node, Sequence[Tensor]], None]) -> Iterator[None]:
    """Call ``observe`` for each `CHECKPOINT` that Dynamo captures, with its node and the fakes of its arguments.

    A node's own arguments include what the region reads from closures and containers.
    """
    original = CheckpointHigherOrderVariable._call_function

    def call(self: Any, tracer: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        given = [arg for arg in args[1:] if isinstance(arg, TensorVariable)]
        result = original(self, tracer, args, kwargs)
        (*_, node) = tracer.output.graph.find_nodes(op="call_function", target=CHECKPOINT)
        observe(node, [arg.as_proxy().node.meta["example_value"] for arg in given])
        return result

    with mock.patch.object(CheckpointHigherOrderVariable, "_call_function", call):
        yield


def untraced(function: _Function) -> _Function:
    """Return ``function``, which Dynamo traces no more, nor what it calls.

    `torch.compiler.disable` wraps it instead, which takes longer than a short function itself (torch 2.13).
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    vars(function)["_torchdynamo_disable"] = True
    return function


class _Tracer:
    """Dynamo's callback for a frame without a valid trace."""

    def __init__(
        self,
        trace: Callable[..., Any],
        around: Callable[[], AbstractContextManager[None]],
        at_limit: Callable[[], None],
    ) -> None:
        self._torchdynamo_orig_backend = trace  # the identity of the backend in Dynamo's cache
        self._around, self._at_limit = around, at_limit

    def __call__(self, *frame: Any) -> Any:
        try:
            with self._around():
                return self._torchdynamo_orig_backend(*frame)
        except FailOnRecompileLimitHit:
            self._at_limit()
        # Untraced, with all that it calls: parts of the model may have run, and cannot run a second time.
        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        return ConvertFrameReturn(skipped, apply_to_code=False)


def compile_call(
    call: Callable[..., Any],
    backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    around: Callable[[], AbstractContextManager[None]],
    recompile_limit: int,
    at_limit: Callable[[], None],
) -> Callable[..., Any]:
    """Return ``call``, captured in graphs that ``backend`` compiles.

    Args:
        call: runs a model.
        backend: returns what runs in place of a graph; held by its caller, as torch keeps all backends of the process
            (torch 2.13; no upstream issue known).
        around: returns the context of each trace; calls that trace nothing do not enter it.
        recompile_limit: of this call alone in torch 2.13 (pytorch#178351); without that change, torch counts the traces
            of all models of a class.
        at_limit: called where code would be traced once more; it runs without a trace.
    """
    reference = weakref.ref(backend)

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = reference()
        assert alive is not None
        return alive(module, inputs)  # a function of its own: torch copies its attributes

    known = inspect.signature(torch.compile).parameters
    wanted = {"isolate_recompiles": True, "recompile_limit": recompile_limit}
    limits: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    compiling: Any = torch._dynamo.optimize(compile_graph, **limits)
    if hasattr(compiling, "callback"):  # torch.compile is not switched off in this process
        compiling.callback = _Tracer(compiling.callback, around, at_limit)
    compiled: Callable[..., Any] = compiling(call)
    return compiled


def inlined(call: Callable[..., Any], forward: Any) -> Callable[..., Any]:
    """Return ``call``, or a function that calls it, which is captured also if ``forward`` is torch's own code.

    `nn.Module.compile` captures nothing of a module of torch.nn, such as Sequential (torch 2.13; pytorch#150915).
    """
    return wrap_inline(call) if trace_rules.check(forward) else call


def is_of_trace(error: BaseException) -> bool:
    """Return whether torch was tracing where ``error`` was raised, not running code."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, TorchDynamoException) or any(
        frame.f_code.co_filename == convert_frame.__file__ for frame in frames
    )


def num_traced_frames() -> int:
    """Return the number of frames that torch has traced in this process, or tried to."""
    return int(counters["frames"]["total"])


def describe_graph_break(reason: Any) -> str:
    """Return one of `graph_break_reasons` as "unet.py:88: …"."""
    frames = [frame for frame in reason.user_stack if frame.filename]
    where = f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}: " if frames else ""
    return where + str(reason.reason).strip().split("\n")[0]


def untraceable_code() -> Counter[str]:
    """Return how often each kind of code has kept torch from tracing: of frames that it skips, all that it says."""
    return Counter(counters["unimplemented"])


def describe_untraceable(since: Counter[str]) -> list[str]:
    """Return what torch has found that it cannot trace since `untraceable_code` was ``since``, with the code."""
    found = []
    for reason in untraceable_code() - since:
        code = re.search(r"Developer debug context: (.+)", reason)
        found.append(reason.split("\n")[0] + (f": {code[1]}" if code else ""))
    return found


def recompile_reasons() -> list[str]:
    """Return the guards that failed before recent traces, the latest last."""
    return [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]


def is_compiled_autograd_enabled() -> bool:
    """Return whether compiled autograd traces the backward that runs now, or is enabled for later ones."""
    return bool(torch._dynamo.compiled_autograd.in_compiled_autograd_region or config.compiled_autograd)


def running_backend() -> object | None:
    """Return the backend object of the torch.compile call for which a graph is compiled now; None outside of one.

    Each call of torch.compile has another one, held only by what the call returned. Torch does not pass it to the
    function that is registered as the backend (torch 2.13; no upstream issue known).
    """
    frame = sys._getframe()
    while frame.f_code is not WrapBackendDebug.__call__.__code__:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    backend: object = frame.f_locals["self"]
    return backend


def backend_of(model: OptimizedModule) -> object | None:
    """Return the object that `running_backend` returns for graphs of ``model``."""
    backend: Any = model.dynamo_ctx.callback
    while backend is not None and not isinstance(backend, WrapBackendDebug):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return backend


def isolate_traces(backend: Any) -> None:
    """Keep other torch.compile calls from running the traces of ``backend``, a result of `running_backend`.

    Torch lets calls with equal backends and options share them (by design, pytorch#168373), unless the user passes
    ``isolate_recompiles``, which torch 2.13 has.
    """
    call = backend._torchdynamo_orig_backend
    if isinstance(call, torch._TorchCompileWrapper):  # not by `torch._dynamo.optimize`
        call.compiler_fn = partial(call.compiler_fn)  # equal to itself only
