"""What torch logs and warns of while it traces code that cannot be traced, before the model's own error, or none."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TORCHS = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def unlogged_failures() -> Iterator[None]:
    """Keeps that page from the log: the error that comes after it says what it said."""

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("failed while attempting to run meta for")

    _TORCHS.addFilter(is_news)
    try:
        yield
    finally:
        _TORCHS.removeFilter(is_news)


@contextmanager
def unwarned_failures() -> Iterator[None]:
    """Suppress the warnings, with a traceback each, by which torch's anomaly mode names the op of a failed backward.

    Torch 2.13 traces backwards in anomaly mode, for the lines of user code that it shows. Where a trace fails it is
    discarded, and the model trains without it. Filters are the process's: one thread may trace at a time.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*(Error detected in|Previous calculation was induced by) ")
        yield
