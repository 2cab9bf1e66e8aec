"""Resident memory without what a process gives back or takes beside tensors, which depends on the tests before."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lmswap.hardware import memory
from lmswap.runtime import _C


class Resident:
    """Stands for resident memory: the heap, and what a test says that the process holds beside its tensors."""

    def __init__(self):
        self.other_bytes = 0

    def __call__(self):
        return self.other_bytes + _C.heap_stats().live_bytes + _C.heap_reusable_bytes()

    def watch(self):
        """A mark of its peak, for which the heap has had no more than tensors then."""
        watch = memory._live().watch()

        def of_process(read):
            return lambda: self.other_bytes + read()

        value, restart = of_process(watch.value), of_process(watch.restart)
        return SimpleNamespace(value=value, restart=restart, paused=watch.paused, stop=watch.stop)


@contextmanager
def memory_of_tensors():
    """Models that are enabled within count tensors alone, in use and at the peak."""
    with pytest.MonkeyPatch.context() as patched:
        resident = Resident()
        patched.setattr(memory, "resident_bytes", resident)
        patched.setattr(memory, "_RESIDENT", resident)
        yield resident
