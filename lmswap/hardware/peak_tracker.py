"""Peaks of a counter since several start times, on top of a single resettable peak of the system.

The peak of resident memory is per process, that of allocated memory per device; a reset by one observer would hide
earlier peaks from the others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PeakTracker:
    """One counter's peak, and its observers."""

    def __init__(self, read: Callable[[], int], reset: Callable[[], None]) -> None:
        """``read`` returns the highest value since ``reset``, which restarts from the current value."""
        self._read, self._reset = read, reset
        self._watches: list[weakref.ref[Watch]] = []  # a `WeakSet` takes several times as long to go through
        self._lock = threading.RLock()  # a collection within may close a model, which stops its observers

    def watch(self) -> Watch:
        """Returns an observer that starts now."""
        watch = Watch(self)
        with self._lock:  # another thread's restart iterates over them
            self._watches = [known for known in self._watches if known() is not None] + [weakref.ref(watch)]
        watch.restart()
        return watch

    def forget(self, watch: Watch) -> None:
        """Ends an observer: restarts of others no longer keep its peak."""
        with self._lock:
            self._watches = [known for known in self._watches if known() not in (None, watch)]

    def since(self, watch: Watch) -> int:
        """The highest value since ``watch`` started."""
        with self._lock:
            return max(watch.earlier, self._read())

    def restart(self, watch: Watch) -> int:
        """Restarts ``watch`` and returns its highest value; the peaks of the others are kept."""
        with self._lock:
            highest = self._read()
            for known in self._watches:
                if (other := known()) is not None and other.earlier < highest:
                    other.earlier = highest
            self._reset()
            ended, watch.earlier = max(watch.earlier, highest), 0
            return ended


class Watch:
    """Observer: the highest value since it was created or last restarted."""

    def __init__(self, mark: PeakTracker) -> None:
        self._mark = mark
        self.earlier = 0  # the highest value before the last reset

    def value(self) -> int:
        """The highest value."""
        return self._mark.since(self)

    def restart(self) -> int:
        """Restarts from the current value, and returns the highest one until now."""
        return self._mark.restart(self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no value counts: at its exit it is as high as it was, or as the current value."""
        highest = self.value()
        try:
            yield
        finally:
            self.restart()
            self.earlier = highest

    def stop(self) -> None:
        """Ends the observer: restarts of others no longer keep its peak. Idempotent."""
        self._mark.forget(self)
