"""Recording of a step under saved-tensor hooks, and its lowering to a Program with measured costs.

::

    forward                      end  loss      backward
    |op 0 |op 1 |op 2 |op 3 .... |op P |op P+1  |op P+2    |op P+3   ...
          ^pack 0     ^pack 2                   ^group 0   ^group 1
                ^pack 1

An op is what runs between two events. A pack is autograd saving a tensor; a group is what one backward node unpacks, at
its start. Hooks can act at these events only, so ops begin only there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.costs import OpCosts
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment, Value
from lmswap.saved_tensors.residency import ResidencyTracker
from lmswap.user_frame import user_line_and_module

# What a saved tensor takes beside its storage: a node of autograd's graph, a packed tensor, and the same of the step
# before, whose graph the caller's loss keeps: 1 to 2.6 KiB a step (a GRU with 2,310, a ConvLSTM with 149; torch 2.13).
_RECORD_BYTES = 3 * 2**10
_PIECE_BYTES = 32 * 2**10


@dataclass(frozen=True)
class Pack:
    """A saved storage: its number, its bytes, the view saved, and the user's line and module that saved it."""

    number: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    source: str
    module: str


@dataclass(frozen=True)
class Group:
    """The storages unpacked by one backward node, in order; the first begins the group."""

    node: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Interval:
    """What ran between two events: seconds, peak tensor bytes since the step began, and what was resident at its start.

    ``present``: storages with other owners. ``kept_bytes``: bytes of further ones, which neither event names.
    ``untracked_bytes``: of what autograd saved in it and peaks leave out, see `DeviceMemory.min_counted_bytes`.
    """

    seconds: float
    peak_bytes: int
    present: frozenset[int]
    kept_bytes: int
    untracked_bytes: int = 0


@dataclass(frozen=True)
class Recorded:
    """Events and intervals of a step; ``held``: storages that others kept resident into the backward."""

    packs: tuple[Pack, ...] = ()
    groups: tuple[Group, ...] = ()
    forward: tuple[Interval, ...] = ()  # one before each pack, one to the end of the forward
    loss: Interval | None = None
    backward: tuple[Interval, ...] = ()  # one after the start of each group
    held: frozenset[int] = frozenset()

    @property
    def saves(self) -> tuple[tuple[int, int], ...]:
        """Number and bytes of the storage of each pack. With ``needs``, all that a plan relies on."""
        return tuple((pack.number, pack.nbytes) for pack in self.packs)

    @property
    def needs(self) -> tuple[int, ...]:
        """The first storage of each group."""
        return tuple(group.numbers[0] for group in self.groups)

    def until_pack(self, pack: int) -> Recorded:
        """Return what this step shares with one that differs at that pack, including the interval before it."""
        return Recorded(self.packs[:pack], forward=self.forward[: pack + 1])

    def until_group(self, group: int) -> Recorded:
        """Return what this step shares with one that differs when that backward node begins."""
        return replace(self, groups=self.groups[:group], backward=self.backward[:group])


class Recording:
    """Records a step that follows no plan, from its beginning or from where it left its plan."""

    def __init__(self, memory: DeviceMemory, base_bytes: int, so_far: Recorded, residency: ResidencyTracker) -> None:
        """``base_bytes``: tensor bytes before the step."""
        self._memory, self._base_bytes = memory, base_bytes
        self.residency = residency
        self._verification_bytes = 0  # when the interval under way began
        self._packs = list(so_far.packs)
        self._groups = [(group.node, dict.fromkeys(group.numbers)) for group in so_far.groups]
        self._forward, self._backward = list(so_far.forward), list(so_far.backward)
        self._loss, self._held = so_far.loss, so_far.held
        self._min_counted_bytes = memory.min_counted_bytes()
        self._small = set[int]()  # addresses of small storages saved so far
        self._untracked_bytes = 0  # in the interval under way
        self._intervals_under_way: list[Interval] | None = None  # destination of the interval under way, if one is
        self._present, self._kept_bytes = frozenset[int](), 0
        self._started = 0.0

    def begin(self, phase: str, transit_bytes: int) -> None:
        """Start an interval; ``phase`` is "forward", "loss" or "backward".

        ``transit_bytes`` of storages are resident only because their copies are under way.
        """
        self._intervals_under_way = (
            self._forward if phase == "forward" else self._backward if phase == "backward" else []
        )
        self._present, kept_bytes, held = self.residency.observe()
        self._kept_bytes = kept_bytes + transit_bytes
        if held:
            self._held |= held
        self._verification_bytes = self.residency.verification_bytes
        self._untracked_bytes = 0
        self._memory.synchronize()
        self._memory.reset_tensor_peak()
        self._started = time.perf_counter()

    def end(self) -> None:
        """End the interval under way, if one is."""
        if self._intervals_under_way is None:
            return
        self._memory.synchronize()
        seconds = time.perf_counter() - self._started
        peak_bytes = self._memory.peak_tensor_bytes() - self._base_bytes - self._verification_bytes
        interval = Interval(seconds, peak_bytes, self._present, self._kept_bytes, self._untracked_bytes)
        self._intervals_under_way.append(interval)
        if self._intervals_under_way is not self._forward and self._intervals_under_way is not self._backward:
            self._loss = interval
        self._intervals_under_way = None

    def save_in_place(self, storage: torch.UntypedStorage | None) -> None:
        """Count a saved tensor that stays; ``storage``: its own, unless that outlives the step."""
        if self._min_counted_bytes == 0:
            return
        self._untracked_bytes += _RECORD_BYTES
        if storage is not None and storage.nbytes() < self._min_counted_bytes and storage.data_ptr() not in self._small:
            self._small.add(storage.data_ptr())
            self._untracked_bytes += storage.nbytes()

    def pack(self, number: int, nbytes: int, tensor: torch.Tensor, names: Mapping[int, str]) -> None:
        """Record a saved storage; ``names``: the model's module names by identity."""
        source, module = user_line_and_module(names)
        dtype, view = str(tensor.dtype).removeprefix("torch."), (tuple(tensor.shape), tuple(tensor.stride()))
        self._packs.append(Pack(number, nbytes, dtype, *view, int(tensor.storage_offset()), source, module))

    def begin_group(self, node: str, number: int, held: Collection[int]) -> None:
        """Record that a backward node unpacks its first storage; ``held``: storages with other owners at that point."""
        self._held |= frozenset(held)
        self._groups.append((node, {number: None}))

    def unpack_more(self, number: int, kept_bytes: int) -> None:
        """Record another storage unpacked by that node; ``kept_bytes``: its part of the bytes named by no event."""
        self._kept_bytes -= kept_bytes
        self._groups[-1][1][number] = None

    def recorded(self) -> Recorded:
        """Return the step recorded so far."""
        intervals = tuple(self._forward), self._loss, tuple(self._backward)
        groups = tuple(Group(node, tuple(numbers)) for node, numbers in self._groups)
        return Recorded(tuple(self._packs), groups, *intervals, self._held)


def lower_recorded(step: Recorded, name: str) -> tuple[Program, OpCosts]:
    """Return the step as a program for the planner, and the measured costs of its ops.

    Args:
        step: a complete recording, including the loss interval.
        name: of the program.
    """
    return _Lowering(step).lower(name)


@dataclass
class _Lowering:
    step: Recorded
    ops: list[Op] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    scratch_bytes: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    untracked: list[int] = field(default_factory=list)  # bytes of the buffers numbered after those of the storages

    def __post_init__(self) -> None:
        self.first: dict[int, Pack] = {}
        for pack in self.step.packs:
            self.first.setdefault(pack.number, pack)
        needed = {number for group in self.step.groups for number in group.numbers}
        # What the backward never unpacks occupies memory until the graph is dropped.
        self.kept = self.step.held | (self.first.keys() - needed)

    def lower(self, name: str) -> tuple[Program, OpCosts]:
        step = self.step
        for pack, interval in zip(step.packs, step.forward[:-1], strict=True):
            self._add("save", pack, interval, (pack.number,))
        self._add("to the end of the forward", None, step.forward[-1], ())
        boundary = len(self.ops)
        assert step.loss is not None
        # Recorded steps count seconds inside the model only.
        self._add("loss", None, replace(step.loss, seconds=0.0), ())
        for group, interval in zip(step.groups, step.backward, strict=True):
            self._add(group.node, self.first[group.numbers[0]], interval, group.numbers)
        segments = (Segment(0, "forward", 0, boundary), Segment(0, "backward", boundary, len(self.ops)))
        program = Program(name, tuple(self.ops), self._buffers(), self._values(), segments)
        return program, OpCosts(tuple(self.seconds), tuple(self.scratch_bytes), "measured")

    def _add(self, what: str, pack: Pack | None, interval: Interval, numbers: tuple[int, ...]) -> None:
        """Append one op. It uses what its event names, and what others held while it ran, which must be resident."""
        there = (interval.present | set(numbers)) & self.first.keys()
        tracked_bytes = interval.kept_bytes + sum(self.first[number].nbytes for number in there)
        first = len(self.first) + len(self.untracked)
        self.untracked += _pieces(interval.untracked_bytes)
        used = [*sorted((there - self.kept) | set(numbers)), *range(first, len(self.first) + len(self.untracked))]
        self.ops.append(
            Op(
                index=len(self.ops),
                name=f"{what} {len(self.ops)}",
                target=what,
                source=pack.source if pack else "",
                reads=tuple(number for number in used if number in self.written),
                writes=tuple(number for number in used if number not in self.written),
                is_repeatable=False,
                module=pack.module if pack else "",
            )
        )
        self.written.update(used)
        self.seconds.append(interval.seconds)
        self.scratch_bytes.append(max(0, interval.peak_bytes - tracked_bytes))

    def _buffers(self) -> tuple[Buffer, ...]:
        kinds = dict.fromkeys(self.kept, BufferKind.OUTPUT)
        buffers = [
            Buffer(number, pack.nbytes, kinds.get(number, BufferKind.ACTIVATION), _name(pack))
            for number, pack in sorted(self.first.items())
        ]
        for nbytes in self.untracked:
            buffers.append(Buffer(len(buffers), nbytes, BufferKind.OUTPUT, "small saved tensors"))
        return tuple(buffers)

    def _values(self) -> tuple[Value, ...]:
        return tuple(
            Value(
                id=number,
                name=f"{pack.module or 'saved'}:{number}",
                buffer=number,
                dtype=pack.dtype,
                shape=pack.shape,
                stride=pack.stride,
                offset=pack.offset,
            )
            for number, pack in sorted(self.first.items())
        )


def _pieces(nbytes: int) -> list[int]:
    """Divide untracked bytes into buffers that are small themselves."""
    whole, rest = divmod(nbytes, _PIECE_BYTES)
    return [_PIECE_BYTES] * whole + [rest] * (rest > 0)


def _name(pack: Pack) -> str:
    """Return the name for reports: by module, else by line."""
    if pack.module:
        return f"{pack.module}: saved tensor"
    return f"saved tensor ({pack.source})" if pack.source else ""
