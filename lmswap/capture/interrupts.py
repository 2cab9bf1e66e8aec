"""Exceptions that a signal's handler raises in the midst of other code, which must not be taken for that code's own.

Python runs handlers between any two of its instructions. Who catches `Exception` there, as torch's compiler does to
raise one of its own, or as trials of operators do, catches what the handler raised too.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any


def interrupt_in(error: BaseException) -> BaseException | None:
    """What a handler raised, if ``error`` is that, or was raised in its place or while it was handled."""
    handlers = set(_handlers())
    raised_by_handler = None
    for each in chained(error):  # what was raised in its place may have its traceback: the last one is the handler's
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(each.__traceback__)):
            raised_by_handler = each
    return raised_by_handler


def raise_interrupt(error: BaseException) -> None:
    """Raise what a handler raised, if ``error`` comes of that."""
    interrupt = interrupt_in(error)
    if interrupt is not None:
        raise interrupt


def chained(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from, or while that was handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _handlers() -> Iterator[CodeType]:
    """The code of all handlers that are Python's now."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not hasattr(handler, "__code__"):
            handler = type(handler).__call__
        if isinstance(code := getattr(handler, "__code__", None), CodeType):
            yield code
