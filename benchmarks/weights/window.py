"""Double-buffered block swap: frozen weights of some blocks return to one of two slots before each use.

What trainers with ``--blocks_to_swap`` do where blocks are frozen: copies in only, by the recorded order of the blocks,
the next block's while the present one computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.weights.paced_file import PacedFile, Stored

_NUM_SLOTS = 2
_ALIGNMENT = 256


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """``count`` of ``items``, spread evenly."""
    return [items[(2 * number + 1) * len(items) // (2 * count)] for number in range(count)]


def frozen(block: nn.Module) -> list[nn.Parameter]:
    """Parameters of a block that are not trained, each once, in which a matrix or a kernel is."""
    return [parameter for parameter in block.parameters() if not parameter.requires_grad and parameter.ndim > 1]


class Copies(Protocol):
    """Where weights of swapped blocks are, and how they get to the device."""

    @property
    def read_bytes(self) -> int:
        """Bytes of the copies begun so far."""

    def store(self, tensor: Tensor) -> Any:
        """Keep the bytes of ``tensor``."""

    def start(self, pairs: Sequence[tuple[Any, Tensor]]) -> Any:
        """Begin to copy each stored tensor to its target, after all that the device has been given to compute."""

    def finish(self, started: Any) -> None:
        """Let what is computed from now on find the copies done."""


class FromFile:
    """Reads in a thread."""

    def __init__(self, bytes_per_second: float) -> None:
        self._file, self._thread = PacedFile(bytes_per_second), ThreadPoolExecutor(1)
        self._read_bytes = 0

    @property
    def read_bytes(self) -> int:
        """See `Copies`; so are the others."""
        return self._read_bytes

    def store(self, tensor: Tensor) -> Stored:  # noqa: D102
        return self._file.store(tensor)

    def start(self, pairs: Sequence[tuple[Stored, Tensor]]) -> Future[None]:  # noqa: D102
        self._read_bytes += sum(stored.nbytes for stored, _ in pairs)
        return self._thread.submit(self._read, pairs)

    def finish(self, started: Future[None]) -> None:  # noqa: D102
        started.result()

    def _read(self, pairs: Sequence[tuple[Stored, Tensor]]) -> None:
        for stored, target in pairs:
            self._file.read(stored, target)


class FromPinned:
    """Copies from pinned memory on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._read_bytes = 0

    @property
    def read_bytes(self) -> int:
        """See `Copies`; so are the others."""
        return self._read_bytes

    def store(self, tensor: Tensor) -> Tensor:  # noqa: D102
        return tensor.detach().pin_memory()

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:  # noqa: D102
        self._read_bytes += sum(stored.nbytes for stored, _ in pairs)
        self._stream.wait_stream(torch.cuda.current_stream())  # the slot's last reader is queued there
        with torch.cuda.stream(self._stream), torch.no_grad():
            for stored, target in pairs:
                target.copy_(stored, non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
        return done

    def finish(self, started: torch.cuda.Event) -> None:  # noqa: D102
        torch.cuda.current_stream().wait_event(started)


class Window:
    """Blocks whose frozen weights take turns in two slots of the device.

    A block's use is seen by a hook before its forward; in a backward its checkpoint calls it again. Nothing else may
    read these weights: between uses they are those of another block.
    """

    def __init__(self, blocks: Sequence[nn.Module], copies: Copies, device: torch.device) -> None:
        """``blocks`` on the host move to ``copies``, with their frozen parameters; what is trained stays."""
        self._copies = copies
        self._stored = [[(weight, copies.store(weight)) for weight in frozen(block)] for block in blocks]
        nbytes = max(sum(map(_aligned, frozen(block))) for block in blocks)
        self._slots = [
            torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(min(_NUM_SLOTS, len(blocks)))
        ]
        self._in_slot: list[int | None] = [None] * len(self._slots)
        self._current = 0  # the slot of the block that computes
        self._loading: dict[int, Any] = {}  # by block
        self._order: list[int] = []  # of the uses in a step
        self._is_recorded = False
        self._next = 0  # place in the order
        for number, block in enumerate(blocks):
            for weight in frozen(block):
                weight.data = torch.empty(0, dtype=weight.dtype, device=device)
            block.register_forward_pre_hook(partial(self._use, number))

    def end_step(self) -> None:
        """Take what was used since the last call as the order of each step."""
        self._is_recorded, self._next = True, 0

    def _use(self, number: int, *_: object) -> None:
        if not self._is_recorded:
            self._order.append(number)
        elif self._order[self._next] != number:
            raise RuntimeError(f"block {number} is used where block {self._order[self._next]} was in the first step")
        if number not in self._in_slot:
            self._load(number)
        self._current = self._in_slot.index(number)
        if (started := self._loading.pop(number, None)) is not None:
            self._copies.finish(started)
        if self._is_recorded:
            self._next = (self._next + 1) % len(self._order)
            following = self._order[self._next]
            if following not in self._in_slot:
                self._load(following)

    def _load(self, number: int) -> None:
        """Begin to load a block into the slot that is not of the one that computes, or into the only one."""
        slot = (self._current + 1) % len(self._slots)
        self._in_slot[slot] = number
        offset, pairs = 0, []
        for weight, stored in self._stored[number]:
            target = self._slots[slot][offset : offset + stored.nbytes].view(stored.dtype).view(stored.shape)
            weight.data = target
            pairs.append((stored, target))
            offset += _aligned(stored)
        self._loading[number] = self._copies.start(pairs)


def _aligned(tensor: Tensor | Stored) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
