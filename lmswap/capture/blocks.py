"""Which pieces of memory does an op take beside its results? Asked of torch's allocator on a GPU, in one run of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MOST_EVENTS = 10_000  # of one op; the most seen are 40, in the backward of an embedding


def scratch_blocks(run: Callable[[], Any], device: torch.device) -> tuple[int, ...] | None:
    """The bytes of each piece that ``run`` takes and has given back when it is over, as many as are there at once.

    None while somebody else records the allocator's history, which is one for all.
    """
    if torch._C._cuda_isHistoryEnabled():
        return None
    record: Callable[..., None] = torch.cuda.memory._record_memory_history
    record("all", context=None, max_entries=_MOST_EVENTS, clear_history=True)
    try:
        made = run()
        events = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        del made
    finally:
        record(None, clear_history=True)
    return tuple(_at_once(events))


def _at_once(events: Iterable[dict[str, Any]]) -> Iterable[int]:
    """Of each size, the most pieces at a time that are given back in the end."""
    events = list(events)
    given_back = Counter(event["addr"] for event in events if event["action"] == "free_requested")
    held: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    size_at: dict[int, int] = {}
    for event in events:
        address, nbytes = event["addr"], event["size"]
        if event["action"] == "alloc" and given_back[address]:
            size_at[address] = nbytes
            held[nbytes] += 1
            most[nbytes] = max(most[nbytes], held[nbytes])
        elif event["action"] == "free_requested":
            given_back[address] -= 1
            if address in size_at:
                held[size_at.pop(address)] -= 1
    for nbytes, count in sorted(most.items(), reverse=True):
        yield from [nbytes] * count
