"""Settings, limits and reports of traces: torch traces a model for each shape, mode, and value read by its code."""

from __future__ import annotations

import gc
import re
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from lmswap.capture.interrupts import chained, interrupt_in
from lmswap.capture.numerics.checkpoint_regions import marked_checkpoints
from lmswap.capture.numerics.is_compiling import detect_is_compiling_calls
from lmswap.capture.numerics.no_decompositions import no_dynamo_decompositions
from lmswap.collection_pause import collection_paused
from lmswap.errors import LmswapError
from lmswap.torch_compat import dynamo
from lmswap.torch_compat.autograd import keeping_dispatch_keys
from lmswap.torch_compat.changing_floats import floats_as_inputs
from lmswap.torch_compat.dynamo import BackendCompilerFailed
from lmswap.torch_compat.modules import eager_call
from lmswap.torch_compat.tracing import without_failure_logs

# Graphs per model (shapes × train/eval × graph breaks) before torch stops compiling it; also the limit of plans for
# steps that save different tensors.
MAX_GRAPHS = 64
# Settings of Dynamo under which an enabled model is traced.
TRACING = {
    "recompile_limit": MAX_GRAPHS,
    "fail_on_recompile_limit_hit": True,
    # Modules' hooks are checked in each call, as by torch without a trace; off by default (pytorch#98372).
    "skip_nnmodule_hook_guards": False,
    # A number read by the code is a constant of the trace, with its bits; see `floats_as_inputs` for those that change.
    "specialize_float": True,
    # It would split the model where DistributedDataParallel's buckets end (by design, pytorch#108966); each part would
    # be planned, and its gradients accumulated, separately. Buckets below 1 MiB raise an error (torch 2.13; no upstream
    # issue known).
    "optimize_ddp": False,
    "assume_static_by_default": True,
    "run_gc_after_compile": False,  # what a trace leaves is collected before its graph first runs, see `Traces.look`
    **dynamo.NO_DECOMPOSITIONS,
}
# Dynamo's settings and torch's tracing flags are global to the process: one model is traced at a time.
_one_traces = threading.RLock()
_MANY = 5  # a batch, a last one that is smaller, and the same of a second data set are four
# Traces for calls without gradients: of those that no other call has used, and of all, before others run untraced.
_MAX_UNUSED, _MAX_WITHOUT_GRADIENTS = 4, MAX_GRAPHS // 4
_COSTS = "Each is traced and planned by itself, which takes seconds and some memory"


@contextmanager
def tracing_settings(*, sizes_may_vary: bool = False) -> Iterator[None]:
    """Set `TRACING` for the duration, and let Dynamo time no guards.

    ``sizes_may_vary``: one trace is to serve all sizes of the inputs that have had several, and numbers likewise. Torch
    sets that in each call, and does not set it back where a signal comes between (torch 2.11 to 2.13; no upstream issue
    known).
    """
    with dynamo.settings({**TRACING, "automatic_dynamic_shapes": sizes_may_vary}), dynamo.untimed_guards():
        yield


class TraceFailed(Exception):
    """torch could not trace the model's code, or the code raised during the trace; ``error`` is what torch raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(next(iter(str(error).strip().splitlines()), type(error).__name__))


class Recompiles:
    """Counts the traces of one model for training, by cause."""

    def __init__(self, model: str) -> None:
        self._model, self._count, self._shapes = model, 0, set[Hashable]()

    def sizes_may_vary(self, shapes: Hashable) -> bool:
        """Whether inputs, now of ``shapes``, vary by more than a last batch that is smaller, or numbers beside them."""
        return self._count > 0 if shapes in self._shapes else len(self._shapes) > 1

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
            f"{self._model} has been traced {_MANY} times for inputs of the same shapes; {_last_recompile_reason()}. "
            f"{_COSTS}: make a number that changes from step to step a tensor (register_buffer, or an argument) and "
            "change its value in place"
        )


class TracesWithoutGradients:
    """Decides which calls without gradients are traced: not each one, as where the keys of a cache grow with it."""

    def __init__(self) -> None:
        self._unused: dict[Hashable, int] = {}  # traces for calls of a kind since one of them needed none
        self._count = 0

    def admits(self, kind: Hashable) -> bool:
        """Whether a call of ``kind`` may be traced, or has a trace; if not, it runs as in plain torch."""
        if self._unused.get(kind, 2) < 2:
            return True
        return sum(self._unused.values()) < _MAX_UNUSED and self._count < _MAX_WITHOUT_GRADIENTS

    def add(self, kind: Hashable, *, is_traced: bool) -> None:
        """Count an admitted call that has run, and whether it was traced."""
        self._unused[kind] = self._unused.get(kind, 0) + 1 if is_traced else 0
        self._count += is_traced


def retrace_limit_reason() -> str:
    """Return why a model is not traced any more."""
    return (
        f"it was traced {MAX_GRAPHS} times, the limit; {_last_recompile_reason()}: make a number that changes from "
        "step to step a tensor, and pad inputs to a few shapes"
    )


def _last_recompile_reason() -> str:
    reasons = dynamo.recompile_reasons()
    if not reasons:
        return "TORCH_LOGS=recompiles shows why"
    condition, *_ = re.sub(r"^\d+/\d+: ", "", reasons[-1].splitlines()[0]).split("  #")
    return f"the last trace was needed since '{condition.strip()}' did not hold any more"


@contextmanager
def _tracing(
    is_compiling_calls: list[str],
    before_trace: Callable[[], None],
    *,
    takes_floats: bool,
    sizes_may_vary: Callable[[], bool],
) -> Iterator[None]:
    """Return the context of a trace.

    Calls that trace nothing do not enter it, which would take longer than all else in a step of a small model.

    Args:
        is_compiling_calls: see `detect_is_compiling_calls`.
        before_trace: called first.
        takes_floats: the graphs' ops can take numbers that are inputs.
        sizes_may_vary: see `tracing_settings`.
    """
    with (
        _one_traces,
        collection_paused(),
        tracing_settings(sizes_may_vary=sizes_may_vary()),
        floats_as_inputs() if takes_floats else nullcontext(),
        no_dynamo_decompositions(),
        marked_checkpoints(),
        detect_is_compiling_calls(is_compiling_calls),
        without_failure_logs(),
    ):
        before_trace()
        yield


class CompiledCall:
    """Like `nn.Module.compile`, but also for modules of torch itself (nn.Sequential), which Dynamo skips."""

    def __init__(
        self,
        model: nn.Module,
        backend: Callable[..., Callable[..., Any]],
        *,
        takes_floats: bool,
        at_limit: Callable[[], None],
        before_trace: Callable[[], None] = lambda: None,
        sizes_may_vary: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to trace ``model``.

        Args:
            model: to be traced.
            backend: compiles its graphs.
            takes_floats: the graphs' ops can take numbers that are inputs; Inductor's kernels cannot.
            at_limit: called where code would be traced more than `MAX_GRAPHS` times; it runs without a trace.
            before_trace: called before torch traces code.
            sizes_may_vary: see `tracing_settings`.
        """
        call = eager_call(model)
        # As `torch.compile` does; for other callables in place of the method, such as a partial, torch finds no file.
        is_method = isinstance(model.forward, MethodType)
        self._call = dynamo.inlined(call, model.forward) if is_method else call
        self._backend, self._at_limit, self._num_made = backend, at_limit, 0
        self.is_compiling_calls: list[str] = []  # lines of user code that make them
        self._tracing = partial(
            _tracing, self.is_compiling_calls, before_trace, takes_floats=takes_floats, sizes_may_vary=sizes_may_vary
        )
        self._make()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, computed by its graphs.

        Raises:
            TraceFailed: torch failed to trace the code, or the code raised during the trace.
        """
        num_traced = dynamo.num_traced_frames()
        # Guards of a failed trace are garbage in cycles, and when collected restore the state that they found: after a
        # failed trace of a jvp the thread is left without autograd (torch 2.13; no upstream issue known).
        with keeping_dispatch_keys():
            try:
                return self._compiled(*args, **kwargs)
            except BaseException as error:
                if dynamo.num_traced_frames() == num_traced:
                    raise
                if not dynamo.is_of_trace(error):
                    # torch has given up on tracing the code that raised, and would not use its existing traces again
                    # (torch 2.13; similar to pytorch#132923). Except after a signal handler, which torch tries to
                    # trace, too.
                    if self._num_made < MAX_GRAPHS and interrupt_in(error) is None:
                        self._make()
                    raise
                failed = _as_raised(error)
                for each in chained(error):
                    traceback.clear_frames(each.__traceback__)
            gc.collect()
        raise failed

    def _make(self) -> None:
        self._compiled = dynamo.compile_call(self._call, self._backend, self._tracing, MAX_GRAPHS, self._at_limit)
        self._num_made += 1


def _as_raised(error: BaseException) -> BaseException:
    """Return what the model's caller gets for ``error``, raised during a trace."""
    if (interrupt := interrupt_in(error)) is not None:
        return interrupt
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, LmswapError):
        inner.__suppress_context__ = True
        return inner.with_traceback(None)  # without a page of frames in torch's compiler
    is_final = isinstance(error, (BackendCompilerFailed, LmswapError))
    return error if is_final or not isinstance(error, Exception) else TraceFailed(error)
