"""Traces the allocations of one op in torch's CUDA caching allocator, and which of its results each one holds.

Of free blocks of one size the allocator returns the lowest, so the order of an op's allocations determines the offsets
of its results, with long lifetimes, and of its scratch memory. One run of the op is traced.
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
from lmswap.torch_compat.caching_allocator import end_history, is_history_recorded, record_history, recorded_events
from lmswap.torch_compat.tensors import storage_id

_MAX_EVENTS = 10_000  # of one op; the most seen are 40, in the backward of an embedding


def trace_allocations(
    run: Callable[[], list[Tensor]], given: Iterable[Tensor], device: torch.device
) -> tuple[Piece, ...] | None:
    """Return the allocations of ``run``, which takes ``given`` tensors; those of equal size from the lowest address up.

    None if the allocator's history, one for the whole process, is being recorded by others.
    """
    if is_history_recorded():
        return None
    record_history(_MAX_EVENTS)
    try:
        made = run()
        events = recorded_events(device)
        results = _addresses(made, given)
        del made
    finally:
        end_history()
    return tuple(_pieces(events, results))


def _addresses(made: Iterable[Tensor], given: Iterable[Tensor]) -> dict[int, int]:
    """Return, for storages that were not ``given``, their numbers by address."""
    old = {storage_id(tensor.untyped_storage()) for tensor in given}
    storages = {storage_id(tensor.untyped_storage()): tensor.untyped_storage().data_ptr() for tensor in made}
    new = [address for storage, address in storages.items() if storage not in old]
    return {address: result for result, address in enumerate(new)}


def _pieces(events: Iterable[dict[str, Any]], results: Mapping[int, int]) -> Iterator[Piece]:
    """Yield, for each size, as many pieces as are allocated at once."""
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
