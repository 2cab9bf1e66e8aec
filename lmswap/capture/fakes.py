"""What does torch log of an op that fails while it is traced? A page of traceback, before the model's own error."""

from __future__ import annotations

import logging
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
