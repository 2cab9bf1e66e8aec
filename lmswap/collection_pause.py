"""A pause of Python's garbage collection around work that makes many objects, few of them garbage.

An import of torch.compile, a trace or a plan of 10,000 tensors makes hundreds of thousands of objects that stay: the
collector would go through all of them, and all older ones, again and again. That took a third of the time of planning
and imports, and a sixth of a trace's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no reference cycles within, in any thread; a collection that the user has disabled stays so."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
