"""What was the highest value of a figure, for several who ask from different times on, where the system keeps one mark?

The mark of resident memory is the process's, that of allocated memory the device's; whoever resets it would hide what
was higher from all others.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable


class PeakTracker:
    """One figure's mark, and all who watch it."""

    def __init__(self, read: Callable[[], int], reset: Callable[[], None]) -> None:
        """``read`` gives the highest value since ``reset``, which starts from the value of now."""
        self._read, self._reset = read, reset
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._lock = threading.Lock()

    def watch(self) -> Watch:
        """Starts to watch from now on."""
        watch = Watch(self)
        with self._lock:  # another thread's restart goes through them
            self._watches.add(watch)
        watch.restart()
        return watch

    def since(self, watch: Watch) -> int:
        """The highest value that ``watch`` has seen."""
        with self._lock:
            return max(watch.earlier, self._read())

    def restart(self, watch: Watch) -> None:
        """``watch`` starts anew; the others keep what they have seen."""
        with self._lock:
            highest = self._read()
            for other in self._watches:
                other.earlier = max(other.earlier, highest)
            self._reset()
            watch.earlier = 0


class Watch:
    """The highest value since it was made or last restarted."""

    def __init__(self, mark: PeakTracker) -> None:
        self._mark = mark
        self.earlier = 0  # the highest value before the mark was last reset

    def value(self) -> int:
        """The highest value."""
        return self._mark.since(self)

    def restart(self) -> None:
        """Starts again from the value of now."""
        self._mark.restart(self)
