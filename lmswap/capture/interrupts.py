"""Detects exceptions raised by a signal handler inside other code, which must not be taken for that code's own.

Python runs handlers between any two of its instructions. Code that catches `Exception` there, as torch's compiler does
to raise one of its own, or as trials of operators do, also catches what the handler raised.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any


def interrupt_in(error: BaseException) -> BaseException | None:
    """Return a handler's exception, if ``error`` is it, or was raised in its place or while it was handled."""
    handlers = set(_handlers())
    raised_by_handler = None
    for each in chained(error):  # what was raised in its place may have its traceback: the last one is the handler's
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(each.__traceback__)):
            raised_by_handler = each
    return raised_by_handler


def raise_interrupt(error: BaseException) -> None:
    """Raise the handler's exception, if ``error`` results from one."""
    interrupt = interrupt_in(error)
    if interrupt is not None:
        raise interrupt


def chained(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, and the errors that it was raised from, or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _handlers() -> Iterator[CodeType]:
    """Yield the code objects of all current Python signal handlers."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler) and not hasattr(handler, "__code__"):
            handler = type(handler).__call__
        if isinstance(code := getattr(handler, "__code__", None), CodeType):
            yield code
