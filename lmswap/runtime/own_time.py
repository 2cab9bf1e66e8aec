"""The host's seconds in lmswap's own code, apart from the model's ops and from torch's tracing, guards and autograd."""

from __future__ import annotations

from time import perf_counter


class OwnTime:
    """Sums pieces of lmswap's code: ``seconds -= perf_counter()`` begins one, ``seconds += perf_counter()`` ends it.

    One piece at a time: it begins where torch or the user calls lmswap, and ends where lmswap returns or calls torch or
    the model. Methods instead of the two statements would take longer than some of the pieces.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def begin_call(self) -> None:
        """Begin a piece at a call of the model or of a graph; one that an exception has ended does not count."""
        self.seconds = max(0.0, self.seconds) - perf_counter()

    def end_call(self) -> None:
        """End the piece under way, if any, as the call returns."""
        if self.seconds < 0:
            self.seconds += perf_counter()

    def take(self) -> float:
        """Return the seconds since the last call, also of a piece under way."""
        begun = perf_counter() if self.seconds < 0 else 0.0
        seconds, self.seconds = self.seconds + begun, -begun
        return seconds
