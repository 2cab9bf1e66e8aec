"""Ends all ranks when one fails: it stores the reason in the store that they share, and each of them repeats that.

A collective would only say that a peer is gone, or wait for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.memory import MeasurementError
from lmswap.errors import LmswapError

_POLL_SECONDS = 0.1
_HEARD_SECONDS = 5.0  # how long a rank that failed waits until all others have said so: torchrun then ends them


@contextmanager
def alarmed(store: Store, rank: int, size: int) -> Iterator[None]:
    """Ends the process with status 1 if this or another rank fails within; stderr says which rank, and why.

    Errors of data, options and swapping are one sentence, others come with their traceback. ``store`` is a connection
    that nothing else uses: a blocked collective may hold that of the process group.
    """
    alarm = _Alarm(store, rank, size)
    try:
        yield
    except Exception as error:
        is_expected = isinstance(error, (DataError, LmswapError, MeasurementError))
        alarm.raise_(str(error) if is_expected else traceback.format_exc())
        raise SystemExit(1) from error
    finally:
        alarm.stop()


class _Alarm:
    """Listens from a thread until it is stopped."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stopped = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="alarm", daemon=True)
        self._listener.start()

    def raise_(self, why: str) -> None:
        """Reports to all ranks that this one fails, with the reason; returns when they have received it."""
        self.stop()
        message = f"error: rank {self._rank}: {why}"
        _say(message)
        if self._store.add("failures", 1) > 1:
            self._store.add("heard", 1)  # another rank was first, and waits for this one
            return
        self._store.set("message", message)
        latest = time.monotonic() + _HEARD_SECONDS
        while self._store.add("heard", 0) < self._size - 1 and time.monotonic() < latest:
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Stops listening."""
        self._stopped.set()
        self._listener.join()

    def _listen(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if self._store.check(["message"]):
                _say(f"{self._store.get('message').decode()} (so rank {self._rank} ends too)")
                self._store.add("heard", 1)
                os._exit(1)  # the main thread may be in a collective that never ends


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")  # in one piece: ranks share the stream
    sys.stderr.flush()
