"""The host's seconds in lmswap's own code, apart from the model's ops and from torch's tracing, guards and autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class OwnTime:
    """Sums pieces of lmswap's code: ``seconds -= perf_counter()`` begins one, ``seconds += perf_counter()`` ends it.

    One piece at a time: it begins where torch or the user calls lmswap, and ends where lmswap returns or calls torch or
    the model. Methods instead of the two statements would take longer than some of the pieces.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._earlier_seconds = 0.0  # before the model's call under way

    def begin_call(self) -> None:
        """Begin a piece at a call of the model; one that an exception has ended does not count."""
        self._earlier_seconds = max(0.0, self.seconds)
        self.seconds = self._earlier_seconds - perf_counter()

    def begin_graph(self) -> None:
        """Begin a piece at a graph within a call of the model; see `begin_call`."""
        self.seconds = max(0.0, self.seconds) - perf_counter()

    def end_call(self) -> None:
        """End the piece under way, if any, as the call returns."""
        if self.seconds < 0:
            self.seconds += perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave a part of the piece under way out: planning, which no step to come repeats. These do not nest."""
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds -= perf_counter() - began

    def take(self) -> float:
        """Return the seconds since the last `take`, without those of a call under way: they are the next step's."""
        seconds = self._earlier_seconds if self.seconds < 0 else self.seconds
        self.seconds -= seconds
        self._earlier_seconds = 0.0
        return seconds
