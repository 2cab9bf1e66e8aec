"""Fake tensors and the context in which torch's compilers trace them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["FakeTensor", "FakeTensorMode", "ShapeEnv", "TracingContext", "tracing"]

_NOT_FAKE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_failure_logs() -> Iterator[None]:
    """Suppress torch's log entry of a failed fake kernel: the error that follows has the same text (torch 2.13).

    No upstream issue known.
    """

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta for")

    _FAKE_TENSORS.addFilter(is_news)
    try:
        yield
    finally:
        _FAKE_TENSORS.removeFilter(is_news)


@contextmanager
def without_failure_warnings() -> Iterator[None]:
    """Suppress the warnings, with a traceback each, by which torch's anomaly mode names the op of a failed backward.

    torch 2.13 traces backwards in anomaly mode, to find lines of user code (pytorch#101047; pytorch#101069 requests the
    error's own text instead of warnings). Filters are global to the process: one thread may trace at a time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*(Error detected in|Previous calculation was induced by) ")
        yield


@contextmanager
def convertible_modules(mode: FakeTensorMode) -> Iterator[None]:
    """Let `nn.Module.to` convert modules of fake tensors of ``mode``, which swaps the contents of two tensors.

    It refuses tensors with weak references, and the mode's memo of fakes by real tensor has one to each (torch 2.13;
    no upstream issue known).
    """
    swap: Callable[..., None] = torch.utils.swap_tensors

    def forget_and_swap(one: torch.Tensor, other: torch.Tensor) -> None:
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    with mock.patch.object(torch.utils, "swap_tensors", forget_and_swap):
        yield


def operator_of(error: BaseException) -> str:
    """Return the operator that fake tensors cannot run: it needs values or has no fake kernel. "" of other errors."""
    return str(error.func) if isinstance(error, _NOT_FAKE) else ""


def clear_fake_cache() -> None:
    """Clear torch's cache of fake results, which are kept by shape: 0.9 MiB for 830 ops, of no use to other shapes."""
    FakeTensorMode.cache_clear()
