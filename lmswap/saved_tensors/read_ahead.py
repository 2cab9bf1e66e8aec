"""Reads of non-resident weights in calls without a graph, fetched ahead in the order of an earlier call.

An operator that reads a weight in its host copy is given a copy on the device instead, and while it runs, the copies
that the next ones will read are fetched. The weight itself stays where it is, so that an exception leaves nothing to
undo. What was read in another order is read in place; so is what an operator writes, or one of another package reads,
whose schema may omit what it writes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmswap.runtime.host_copies import Fetched, HostCopies
from lmswap.runtime.storage import has_plain_storage
from lmswap.runtime.streams import Streams
from lmswap.torch_compat.operators import OpOverload, TorchDispatchMode, schema_of
from lmswap.torch_compat.tensors import storage_id

# Operators that read a few rows of a table, which is not fetched for them.
_READ_FEW = {torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.index, torch.ops.aten.gather}


class _Held(NamedTuple):
    """A fetched copy, and the stream that its memory belongs to."""

    fetched: Fetched
    stream: int


class ReadAhead:
    """The fetched copies of one model's weights: those that are read now, and those that are read next.

    One thread at a time reads copies, that of the latest pass; all others read in place.
    """

    def __init__(self, host_copies: HostCopies, streams: Streams) -> None:
        self._host_copies, self._streams = host_copies, streams
        self._orders: dict[str, list[int]] = {}  # by phase: the weights as the last such pass has read them
        self._weights: dict[int, torch.UntypedStorage] = {}  # that may be fetched, by `storage_id`
        self._max_bytes = 0
        self._phase: str | None = None  # of the pass under way
        self._read: list[int] = []  # by that pass, each change from one weight to another
        self._position = 0  # in the recorded order, of what is read next
        self._held: dict[int, _Held] = {}
        self._arrived = set[int]()
        self._thread, self._lock = 0, threading.RLock()

    @property
    def is_reading(self) -> bool:
        """Whether a pass is under way in this thread in which weights may be fetched."""
        return self._phase is not None and self._thread == threading.get_ident()

    @contextmanager
    def operators(self, phase: str, weights: Collection[torch.UntypedStorage], max_bytes: int) -> Iterator[None]:
        """Return the context in which operators of this thread read copies of ``weights``, of ``max_bytes`` at a time.

        ``phase`` names what is run: its order is recorded, and expected of the next pass of that name. A backward that
        follows reads the weights of the last forward.
        """
        if not weights:
            self._weights = {}
            yield
            return
        before, self._max_bytes = self._weights, max_bytes
        self._weights = {storage_id(each): each for each in weights}
        self.begin(phase)
        try:
            with _Reading(self):
                yield
        finally:
            self.end()
            if phase != "forward":
                self._weights = before

    def begin(self, phase: str) -> None:
        """Begin a pass, as of a backward."""
        with self._lock:
            self._drop_all()
            if self._weights:
                self._phase, self._thread = phase, threading.get_ident()
                self._read, self._position = [], 0
                self._fetch(None)

    def end(self) -> None:
        """End this thread's pass, and drop all copies: the caller may write weights from here on."""
        with self._lock:
            if self._phase is not None and self.is_reading:
                self._orders[self._phase] = self._read
                self._drop_all()

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return ``tensor`` on the copy of its weight, and fetch the next ones; None: it is to be read where it is."""
        if self._phase is None or not has_plain_storage(tensor):
            return None
        number = storage_id(tensor.untyped_storage())
        if number not in self._weights:
            return None
        with self._lock:
            return self._copy_of(tensor, number) if self.is_reading else None

    def forget(self, tensor: Tensor) -> None:
        """Read the weight of ``tensor`` in place from now on in this pass: it may be written."""
        with self._lock:
            if has_plain_storage(tensor) and self._weights.pop(storage_id(tensor.untyped_storage()), None) is not None:
                self._drop(storage_id(tensor.untyped_storage()))

    def _copy_of(self, tensor: Tensor, number: int) -> Tensor | None:
        if self._read[-1:] != [number]:
            self._read.append(number)
            self._fetch(number)
        held = self._held.get(number)
        if held is None or held.stream != self._streams.current():
            return None
        if number not in self._arrived:
            self._host_copies.finish_read(held.fetched)
            self._arrived.add(number)
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return view.set_(held.fetched.memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _fetch(self, number: int | None) -> None:
        """Keep the copies of the weight that is read now and of the next ones, as far as there is room; fetch them."""
        expected = self._orders.get(self._phase or "", [])
        if number is not None:
            try:
                self._position = expected.index(number, self._position) + 1
            except ValueError:
                return  # another order than before
        wanted: dict[int, torch.UntypedStorage] = {}
        room_bytes = self._max_bytes
        for each in (*([number] if number is not None else ()), *expected[self._position :]):
            storage = self._weights.get(each)
            if storage is None or each in wanted:
                continue
            room_bytes -= storage.nbytes()
            if room_bytes < 0:
                break
            wanted[each] = storage
        for each in self._held.keys() - wanted.keys():
            self._drop(each)
        for each, storage in wanted.items():
            if each not in self._held and (fetched := self._host_copies.prepare_fetch(storage)) is not None:
                # First: its memory lives on if this is interrupted.
                self._held[each] = _Held(fetched, self._streams.current())
                self._host_copies.start_move(fetched)

    def _drop(self, number: int) -> None:
        held = self._held.get(number)
        if held is not None:
            if number not in self._arrived:
                with self._streams.at(held.stream):  # which reuses the memory
                    self._host_copies.cancel_read(held.fetched)
            self._arrived.discard(number)
            del self._held[number]

    def _drop_all(self) -> None:
        self._phase = None
        for number in list(self._held):
            self._drop(number)


class _Reading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators copies of the weights that they only read."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that the caller has compiled run their own graphs."""
        return True

    def __init__(self, ahead: ReadAhead) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ahead = ahead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ahead = self._ahead
        if not ahead.is_reading:
            return func(*args, **kwargs)
        access = _access(func)
        if access is _Access.READ:
            found = [(each, ahead.copy_of(each)) for each in _tensors((*args, *kwargs.values()))]
            copies = {id(weight): copy for weight, copy in found if copy is not None}
            if copies:
                named = dict(zip(kwargs, _replaced(kwargs.values(), copies), strict=True))
                result = func(*_replaced(args, copies), **named)
                if not any(_share(each, copy) for each in _tensors((result,)) for copy in copies.values()):
                    return result  # else it has returned what it was given, though its schema does not say so
        elif access is _Access.WRITE:
            for each in _tensors((*args, *kwargs.values())):
                ahead.forget(each)
        return func(*args, **kwargs)


class _Access(Enum):
    """What an operator does with a weight, by its schema."""

    READ = "read"
    VIEW = "view"  # reads nothing, or few rows
    WRITE = "write"  # or may do so: it is another package's, or has no schema


@cache
def _access(operator: Any) -> _Access:
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return _Access.WRITE
    aliases = [argument.alias_info for argument in schema_of(operator).arguments if argument.alias_info is not None]
    if any(alias.is_write for alias in aliases):
        return _Access.WRITE
    return _Access.VIEW if aliases or operator.overloadpacket in _READ_FEW else _Access.READ


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among ``values`` and in lists of them, as operators take and return them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _replaced(values: Iterable[Any], copies: Mapping[int, Tensor]) -> list[Any]:
    return [
        copies.get(id(value), value) if not isinstance(value, (list, tuple)) else _replaced(value, copies)
        for value in values
    ]


def _share(one: Tensor, other: Tensor) -> bool:
    return has_plain_storage(one) and storage_id(one.untyped_storage()) == storage_id(other.untyped_storage())
