"""Settings, limits and reports of traces: torch traces a model for each shape, mode, and value read by its code."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import convert_frame, guards, trace_rules
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.external_utils import wrap_inline
from torch._dynamo.utils import counters, get_compilation_metrics

from lmswap.capture.interrupts import chained, interrupt_in
from lmswap.capture.log_filter import suppress_failure_logs
from lmswap.capture.numerics.changing_floats import floats_as_inputs
from lmswap.capture.numerics.checkpoint_regions import marked_checkpoints
from lmswap.capture.numerics.is_compiling import detect_is_compiling_calls
from lmswap.capture.numerics.no_decompositions import AS_CALLED, no_dynamo_decompositions
from lmswap.errors import LmswapError

# Graphs per model (shapes × train/eval × graph breaks) before torch stops compiling it; also the limit of plans for
# steps that save different tensors.
MAX_GRAPHS = 64
# Settings of Dynamo under which an enabled model is traced.
TRACING = {
    "recompile_limit": MAX_GRAPHS,
    "fail_on_recompile_limit_hit": True,
    # Modules' hooks are checked in each call, as by torch without a trace.
    "skip_nnmodule_hook_guards": False,
    # A number read by the code is a constant of the trace, with its bits; see `floats_as_inputs` for those that change.
    "specialize_float": True,
    # It would split the model where DistributedDataParallel's buckets end; each part would be planned, and its
    # gradients accumulated, separately. Buckets below 1 MiB raise an error.
    "optimize_ddp": False,
    # As torch.compile(dynamic=False) has it, which would set them in each call, and does not set them back where a
    # signal comes between (2.11 to 2.13).
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    **AS_CALLED,
}
# Dynamo's settings and torch's tracing flags are global to the process: one model is traced at a time.
_one_traces = threading.RLock()
_MANY = 5  # a batch, a last one that is smaller, and the same of a second data set are four
_COSTS = "Each is traced and planned by itself, which takes seconds and some memory"


def _untimed(*_: Any) -> float:
    return 0.0


@contextmanager
def tracing_settings() -> Iterator[None]:
    """Set `TRACING` for the duration; `torch._dynamo.config.patch` would create a class in each call.

    Guards are not timed: to log their times torch (2.11 to 2.13) flushes the CPU's caches after each trace, which takes
    31 ms and, of the budget, 32 MiB.
    """
    config = torch._dynamo.config
    before = {name: getattr(config, name) for name in TRACING}
    in_guards = vars(guards)
    time_guards = in_guards["profile_guard_manager"]
    try:
        for name, value in TRACING.items():
            setattr(config, name, value)
        in_guards["profile_guard_manager"] = _untimed
        yield
    finally:
        in_guards["profile_guard_manager"] = time_guards
        for name, value in before.items():
            setattr(config, name, value)


class TraceFailed(Exception):
    """torch could not trace the model's code, or the code raised during the trace; ``error`` is what torch raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(next(iter(str(error).strip().splitlines()), type(error).__name__))


class Recompiles:
    """Counts the traces of one model for training, by cause."""

    def __init__(self, model: str) -> None:
        self._model, self._count, self._shapes = model, 0, set[Hashable]()

    def add(self, shapes: Hashable) -> str | None:
        """Count a trace for inputs of ``shapes``; return the warning once there are many of one kind."""
        num_known, self._shapes = len(self._shapes), self._shapes | {shapes}
        if len(self._shapes) > num_known:
            return self._many_shapes() if len(self._shapes) == _MANY else None
        self._count += 1
        return self._many_numbers() if self._count == _MANY else None

    def _many_shapes(self) -> str:
        return (
            f"{self._model} has been trained with inputs of {_MANY} different shapes. {_COSTS}: pad batches to a few "
            "lengths, and drop a smaller last batch (drop_last=True)"
        )

    def _many_numbers(self) -> str:
        return (
            f"{self._model} has been traced {_MANY} times for inputs of the same shapes; {_why()}. {_COSTS}: make a "
            "number that changes from step to step a tensor (register_buffer, or an argument) and change its value "
            "in place"
        )


def too_many() -> str:
    """Return why a model is not traced any more."""
    return (
        f"it was traced {MAX_GRAPHS} times, the limit; {_why()}: make a number that changes from "
        "step to step a tensor, and pad inputs to a few shapes"
    )


def _why() -> str:
    reasons = [metrics.recompile_reason for metrics in get_compilation_metrics() if metrics.recompile_reason]
    if not reasons:
        return "TORCH_LOGS=recompiles shows why"
    condition, *_ = re.sub(r"^\d+/\d+: ", "", reasons[-1].splitlines()[0]).split("  #")
    return f"the last trace was needed since '{condition.strip()}' did not hold any more"


class _Tracing:
    """Dynamo's callback for a frame without a valid trace: traces it under the settings that lmswap needs.

    Calls that trace nothing do not set them, which would take longer than all else in a step of a small model.
    """

    def __init__(self, trace: Callable[..., Any], is_compiling_calls: list[str], *, takes_floats: bool) -> None:
        """``trace`` is torch's own callback; `detect_is_compiling_calls` adds to ``is_compiling_calls``."""
        self._torchdynamo_orig_backend = trace  # the identity of the backend in Dynamo's cache
        self._is_compiling_calls, self._takes_floats = is_compiling_calls, takes_floats

    def __call__(self, *frame: Any) -> Any:
        with (
            _one_traces,
            tracing_settings(),
            floats_as_inputs() if self._takes_floats else nullcontext(),
            no_dynamo_decompositions(),
            marked_checkpoints(),
            detect_is_compiling_calls(self._is_compiling_calls),
            suppress_failure_logs(),
        ):
            return self._torchdynamo_orig_backend(*frame)


class CompiledCall:
    """Like `nn.Module.compile`, but also for modules of torch itself (nn.Sequential), which Dynamo skips."""

    def __init__(
        self, model: nn.Module, backend: Callable[..., Callable[..., Any]], *, takes_floats: bool = False
    ) -> None:
        """``takes_floats``: the graphs' ops can take numbers that are inputs; Inductor's kernels cannot."""
        call: Callable[..., Any] = model._call_impl
        # As `torch.compile` does; for other callables in place of the method, such as a partial, torch finds no file.
        is_method = isinstance(model.forward, MethodType)
        self._call = wrap_inline(call) if is_method and trace_rules.check(model.forward) else call
        self._backend, self._takes_floats, self._num_made = backend, takes_floats, 0
        self.is_compiling_calls: list[str] = []  # lines of user code that make them
        self._make()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, computed by its graphs.

        Raises:
            TraceFailed: torch failed to trace the code, or the code raised during the trace.
        """
        num_traced = _num_traced()
        # Guards of a failed trace are garbage in cycles, and when collected restore the state that they found: after a
        # failed trace of a jvp, torch 2.13 leaves the thread without autograd.
        with _keeping_dispatch_keys():
            try:
                return self._compiled(*args, **kwargs)
            except BaseException as error:
                if _num_traced() == num_traced:
                    raise
                if not _is_of_trace(error):
                    # torch has given up on tracing the code that raised, and would not use its existing traces again.
                    # Except after a signal handler, which torch tries to trace, too.
                    if self._num_made < MAX_GRAPHS and interrupt_in(error) is None:
                        self._make()
                    raise
                failed = _as_raised(error)
                for each in chained(error):
                    traceback.clear_frames(each.__traceback__)
            gc.collect()
        raise failed

    def _make(self) -> None:
        backend = self._backend

        def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return backend(module, inputs)  # a function of its own: torch copies its attributes

        compiling: Any = torch._dynamo.optimize(compile_graph, **_recompile_arguments())
        if hasattr(compiling, "callback"):  # torch.compile is not switched off in this process
            compiling.callback = _Tracing(compiling.callback, self.is_compiling_calls, takes_floats=self._takes_floats)
        self._compiled: Callable[..., Any] = compiling(self._call)
        self._num_made += 1


def _keeping_dispatch_keys() -> AbstractContextManager[None]:
    """Restore this thread's dispatch keys at exit."""
    guard: Any = torch._C._ForceDispatchKeyGuard
    keys: AbstractContextManager[None] = guard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    )
    return keys


def _is_of_trace(error: BaseException) -> bool:
    """Return whether torch was tracing where it was raised, not running code."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return isinstance(error, TorchDynamoException) or any(
        frame.f_code.co_filename == convert_frame.__file__ for frame in frames
    )


def _as_raised(error: BaseException) -> BaseException:
    """Return what the model's caller gets for ``error``, raised during a trace."""
    if (interrupt := interrupt_in(error)) is not None:
        return interrupt
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, LmswapError):
        inner.__suppress_context__ = True
        return inner.with_traceback(None)  # without a page of frames in torch's compiler
    is_final = isinstance(error, (BackendCompilerFailed, FailOnRecompileLimitHit, LmswapError))
    return error if is_final or not isinstance(error, Exception) else TraceFailed(error)


def _num_traced() -> int:
    """Return the number of frames that torch has traced in this process, or tried to."""
    return int(counters["frames"]["total"])


def _recompile_arguments() -> dict[str, Any]:
    """Return arguments that keep this model's graphs apart from those of other models of its class, for torch 2.13."""
    known = inspect.signature(torch.compile).parameters
    wanted = {"isolate_recompiles": True, "recompile_limit": MAX_GRAPHS}
    return {name: value for name, value in wanted.items() if name in known}
