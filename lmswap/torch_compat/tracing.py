"""Fake tensors and the context in which torch's compilers trace them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["FakeTensorMode", "ShapeEnv", "TracingContext", "tracing"]

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


def clear_fake_cache() -> None:
    """Clear torch's cache of fake results, which are kept by shape: 0.9 MiB for 830 ops, of no use to other shapes."""
    FakeTensorMode.cache_clear()
