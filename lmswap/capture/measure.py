"""What does each op cost and make on this device? Each distinct one is run a few times on made-up tensors.

Random state is left as it was found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lmswap.capture.draws import is_random
from lmswap.capture.examples import Examples, makers_of_seeds, only_looks
from lmswap.capture.interrupts import raise_interrupt
from lmswap.capture.loss import assumed_bytes
from lmswap.capture.lower import is_foreign, source_line, tensors
from lmswap.capture.pieces import take_apart
from lmswap.capture.schemas import check_schema
from lmswap.capture.trials import ScratchMeter, Trial, try_by_clock, try_by_events
from lmswap.errors import CaptureError, DriverError
from lmswap.execute.draws import generator_states, set_generator_states
from lmswap.execute.graph import SegmentGraph, value_of
from lmswap.execute.storage import has_plain_storage
from lmswap.ir.arena_layout import SMALL_BYTES
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts, Piece
from lmswap.ir.program import LOSS, Program
from lmswap.waiting import progress

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Measured:
    seconds: float | None  # None: it was not run, and its time is estimated
    pieces: tuple[Piece, ...]
    made: tuple[torch.Tensor, ...] | None  # on the meta device
    devices: tuple[torch.device, ...] | None  # where they really lie
    repeats: bool  # was seen to give the same bits again


_NOTHING = _Measured(0.0, (), (), (), repeats=True)
_REFUSED = _Measured(None, (), None, None, repeats=False)
# Made-up values may never end them; and what they take is a matter of values.
_LOOPS = ("while_loop", "while_loop_stack_output")


class OpMeter:
    """Times ops of any number of programs on one device; each distinct op only once."""

    def __init__(
        self,
        device: torch.device,
        meter: ScratchMeter,
        estimate: Callable[[Program], OpCosts],
        note: Callable[[str], None] = _log.info,
    ) -> None:
        """``note`` takes a sentence for people on an op that could not be timed."""
        self._device, self._meter, self._estimate, self._note = device, meter, estimate, note
        self._known: dict[Any, _Measured] = {}
        self._examples = Examples()

    def costs(self, program: Program, graphs: Sequence[SegmentGraph]) -> OpCosts:
        """Seconds and scratch bytes of each op; where an op refuses made-up inputs its roofline estimate stands in.

        Raises:
            CaptureError: an operator does what its schema does not say.
            DriverError: an operator broke the device for all that follows.
        """
        nodes = [node for graph in graphs for node in graph.ops]
        estimated = self._estimate(program)
        keys = [
            None if op.is_view or op.target == LOSS else _signature(node)
            for op, node in zip(program.ops, nodes, strict=True)
        ]
        to_time = {key: estimated.seconds[index] for index, key in enumerate(keys) if key and key not in self._known}
        num_timed, timed_seconds, all_seconds = 0, 0.0, sum(to_time.values())
        seconds: list[float] = []
        pieces: list[tuple[Piece, ...]] = []
        with self._alone():
            for op, node, key in zip(program.ops, nodes, keys, strict=True):
                if op.target == LOSS:
                    seconds.append(0.0)
                    pieces.append((Piece(assumed_bytes(program)),))
                    continue
                measured = _NOTHING if op.is_view else self._measure(node, key)
                if key in to_time:
                    num_timed, timed_seconds = num_timed + 1, timed_seconds + to_time.pop(key)
                    progress(num_timed, num_timed + len(to_time), timed_seconds / (all_seconds or 1.0))
                seconds.append(estimated.seconds[op.index] if measured.seconds is None else measured.seconds)
                pieces.append(measured.pieces)
        return OpCosts(tuple(seconds), tuple(map(_scratch_bytes, pieces)), "measured", tuple(pieces))

    def made(self, node: fx.Node) -> tuple[torch.Tensor, ...] | None:
        """The tensors that an op makes, without their memory; None where it refuses made-up inputs."""
        with self._alone():
            return self._measure(node).made

    def repeats(self, node: fx.Node) -> bool:
        """Whether an op gives the same bits again, from another thread too.

        A CPU's kernels do. A GPU's may add in any order, and libraries choose among them by thread: what was not seen
        to repeat its bits is not run again.
        """
        if self._device.type == "cpu":
            return True
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:  # it finds other values the next time
            return False
        with self._alone():
            return self._measure(node).repeats

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Runs ops for real, in the middle of a trace, and leaves nothing of it behind."""
        on_gpu = self._device.type == "cuda"
        with (
            _disable_current_modes(),
            no_python_dispatcher(),
            torch.no_grad(),
            torch.cuda.device(self._device) if on_gpu else nullcontext(),
            torch.random.fork_rng([self._device] if on_gpu else []),
        ):
            yield

    def _measure(self, node: fx.Node, key: Any = None) -> _Measured:
        for maker in makers_of_seeds(node):
            self._measure(maker)
        key = key or _signature(node)
        if key not in self._known:
            self._known[key] = _NOTHING if only_looks(node) else self._run(node)
        self._examples.learn(node, self._known[key].devices)
        return self._known[key]

    def _run(self, node: fx.Node) -> _Measured:
        if str(node.target) in _LOOPS:
            return _REFUSED
        for _ in range(2):
            try:
                return self._try(node)
            except CaptureError:
                raise
            except torch.OutOfMemoryError:
                pass  # once more, when what the error holds is gone, and what torch keeps
            except Exception as error:  # an operator may refuse made-up inputs with any error
                raise_interrupt(error)
                self._check_device(node, error)
                _log.info("op %s takes no made-up inputs, its cost is estimated: %s", node.target, error)
                return _REFUSED
            self._meter.trim()
        return self._too_large(node)

    def _try(self, node: fx.Node) -> _Measured:
        args, kwargs = self._examples.arguments(node)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if is_foreign(node):
            check_schema(node, args, kwargs)
        if self._device.type == "cpu":
            trial = try_by_clock(lambda: target(*args, **kwargs), self._meter)
            _check_storages(node, trial.made)
            return _measured(trial, None)
        states = generator_states(self._device) if is_random(node) else None

        def run() -> Any:
            if states is not None:  # draws repeat from the state of the generator
                set_generator_states(states, self._device)
            return target(*args, **kwargs)

        trial = try_by_events(run, self._meter, self._device, compared=lambda made: not _is_idle_seed(node, made))
        _check_storages(node, trial.made)
        results = [nbytes for nbytes in _storage_bytes(trial.made) if nbytes > SMALL_BYTES]
        if trial.scratch_bytes <= SMALL_BYTES and len(results) < 2:  # nothing to be told apart
            return _measured(trial, None)
        return _measured(trial, take_apart(lambda: tensors(run()), tensors((args, kwargs)), self._device))

    def _too_large(self, node: fx.Node) -> _Measured:
        nbytes = sum(_storage_bytes(tensors(node.meta.get("val"))))
        self._note(
            f"op '{node.name}' ({source_line(node)}) did not fit on the device when it was to be timed: its time is "
            f"estimated, and for its scratch memory counts as much as it makes, {format_bytes(nbytes)}"
        )
        return _Measured(None, (Piece(nbytes),), None, None, repeats=False)

    def _check_device(self, node: fx.Node, error: Exception) -> None:
        """Raises if the device is lost: then all that comes would fail, wherever it stands."""
        try:
            self._meter.synchronize()
        except RuntimeError as lost:
            reason = str(error).splitlines()[0]
            raise DriverError(
                f"op '{node.name}' ({source_line(node)}) broke the device when it was timed on made-up inputs, and "
                f"this process cannot use it any more: {reason}. Please report the op, {node.target}; "
                'lmswap.enable(model, compiler="eager") times none'
            ) from lost


def _measured(trial: Trial, pieces: tuple[Piece, ...] | None) -> _Measured:
    if pieces is None:  # nobody looked
        pieces = (Piece(trial.scratch_bytes),)
    made = tuple(map(_outline, trial.made))
    devices = tuple(tensor.device for tensor in trial.made)
    return _Measured(trial.seconds, pieces, made, devices, trial.repeats)


def _check_storages(node: fx.Node, made: Iterable[torch.Tensor]) -> None:
    """Raises CaptureError for a quantized tensor or the like, which torch 2.13 may trace as one of plain numbers."""
    other = next((tensor for tensor in made if not has_plain_storage(tensor.resolve_conj().resolve_neg())), None)
    if other is not None:
        raise CaptureError(
            f"op '{node.name}' ({source_line(node)}) makes a tensor of {other.dtype} in layout {other.layout}, whose "
            "bytes alone are not its values"
        )


def _scratch_bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces if piece.result is None)


def _storage_bytes(values: Iterable[torch.Tensor]) -> list[int]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in values}.values())


def _is_idle_seed(node: fx.Node, made: torch.Tensor) -> bool:
    """Whether ``made`` may be the seed of draws that ``node`` does not make in this call: nobody writes it then."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return may_draw and not is_random(node) and not made.is_floating_point()


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(count, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _signature(node: fx.Node) -> Any:
    def describe(leaf: Any) -> Any:
        value = value_of(leaf) if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, fx.GraphModule):  # that a higher-order op runs
            return tuple(map(_signature, value.graph.nodes))
        if isinstance(value, torch.Tensor):
            return (value.dtype, tuple(value.shape), tuple(value.stride()), value.storage_offset(), str(value.device))
        return repr(value)

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return (str(node.target), repr(spec), tuple(describe(leaf) for leaf in leaves))
