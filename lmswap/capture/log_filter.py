"""Suppresses torch's messages on failed traces, whose errors say the same, and clears what traces leave cached."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses import FakeTensorMode

_TORCHS = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def suppress_failure_logs() -> Iterator[None]:
    """Suppress torch's log entry of a failed fake kernel: the error that follows has the same text."""

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta for")

    _TORCHS.addFilter(is_news)
    try:
        yield
    finally:
        _TORCHS.removeFilter(is_news)


@contextmanager
def suppress_failure_warnings() -> Iterator[None]:
    """Suppress the warnings, with a traceback each, by which torch's anomaly mode names the op of a failed backward.

    torch 2.13 traces backwards in anomaly mode, to find lines of user code. A failed trace is discarded, and the model
    trains without it. Filters are global to the process: one thread may trace at a time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*(Error detected in|Previous calculation was induced by) ")
        yield


def forget_fakes() -> None:
    """Clear torch's cache of fake results, which are kept by shape: 0.9 MiB for 830 ops, of no use to other shapes."""
    FakeTensorMode.cache_clear()
