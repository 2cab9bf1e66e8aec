"""Which pieces of memory does an op take, and which of its results lies in which? Asked of torch's allocator on a GPU.

Where several of one size are free, the allocator takes the lowest, so that the order in which an op asks decides what
lies where: a result, which is there for long, or scratch, which is there for the op only. One run of it is watched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmswap.ir.arena_layout import SMALL_BYTES, slot_bytes
from lmswap.ir.costs import Piece

_MOST_EVENTS = 10_000  # of one op; the most seen are 40, in the backward of an embedding


def take_apart(
    run: Callable[[], list[Tensor]], given: Iterable[Tensor], device: torch.device
) -> tuple[Piece, ...] | None:
    """What ``run``, which is ``given`` tensors and makes others, takes; equal pieces from the lowest address up.

    None while somebody else records the allocator's history, which is one for all.
    """
    if torch._C._cuda_isHistoryEnabled():
        return None
    record: Callable[..., None] = torch.cuda.memory._record_memory_history
    record("all", context=None, max_entries=_MOST_EVENTS, clear_history=True)
    try:
        made = run()
        events = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
        results = _addresses(made, given)
        del made
    finally:
        record(None, clear_history=True)
    return tuple(_pieces(events, results))


def _addresses(made: Iterable[Tensor], given: Iterable[Tensor]) -> dict[int, int]:
    """Of storages that were not ``given``: by address, which of them it is."""
    old = {tensor.untyped_storage()._cdata for tensor in given}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().data_ptr() for tensor in made}
    new = [address for storage, address in storages.items() if storage not in old]
    return {address: result for result, address in enumerate(new)}


def _pieces(events: Iterable[dict[str, Any]], results: Mapping[int, int]) -> Iterator[Piece]:
    """Of each size as many as are there at once."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    free: dict[int, set[int]] = defaultdict(set)
    held: dict[int, tuple[int, int]] = {}  # by address
    for event in events:
        address, nbytes = int(event["addr"]), int(event["size"])
        if event["action"] == "alloc":
            size = slot_bytes(nbytes) if nbytes > SMALL_BYTES else nbytes
            if not free[size]:
                free[size].add(len(pieces[size]))
                pieces[size].append(Piece(0))
            rank = min(free[size])
            free[size].remove(rank)
            pieces[size][rank] = Piece(max(nbytes, pieces[size][rank].nbytes))
            held[address] = size, rank
        elif event["action"] == "free_requested" and address in held:
            size, rank = held.pop(address)
            free[size].add(rank)
    for address, (size, rank) in held.items():
        pieces[size][rank] = replace(pieces[size][rank], result=results.get(address))
    for size in sorted(pieces, reverse=True):
        yield from pieces[size]
