"""Measures cost and results of each distinct op on the device, by a few runs on synthetic inputs.

The RNG state is restored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lmswap.capture.caller_memory import assumed_bytes
from lmswap.capture.check_schema import check_schema
from lmswap.capture.interrupts import raise_interrupt
from lmswap.capture.lower import is_extension_op, source_line
from lmswap.capture.numerics.random_ops import is_random
from lmswap.capture.op_costs.allocation_trace import trace_allocations
from lmswap.capture.op_costs.synthetic_inputs import SyntheticInputs, has_no_tensor_results, seed_ops
from lmswap.capture.op_costs.trials import Trial, time_on_cpu, time_on_gpu
from lmswap.errors import CaptureError, DriverError
from lmswap.hardware.memory import DeviceMemory
from lmswap.ir.arena_layout import SMALL_BYTES
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts, Piece
from lmswap.ir.program import LOSS, Program
from lmswap.progress import set_progress
from lmswap.runtime.codegen import SegmentGraph, value_of
from lmswap.runtime.rng import rng_states, set_rng_states
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.operators import eager_dispatch, schema_of
from lmswap.torch_compat.pytree import tensors, tree_flatten
from lmswap.torch_compat.tensors import storage_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Measured:
    seconds: float | None  # None: not timed, its time is estimated
    pieces: tuple[Piece, ...]
    made: tuple[torch.Tensor, ...] | None  # on the meta device
    devices: tuple[torch.device, ...] | None  # where the results really are
    repeats: bool  # whether results were bitwise identical in each run


_NOTHING = _Measured(0.0, (), (), (), repeats=True)
_REFUSED = _Measured(None, (), None, None, repeats=False)
# Synthetic values may never end them; and their memory depends on values.
_LOOPS = ("while_loop", "while_loop_stack_output")


class OpProfiler:
    """Profiles ops of any number of programs on one device, each distinct op once."""

    def __init__(
        self,
        device: torch.device,
        meter: DeviceMemory,
        estimate: Callable[[Program], OpCosts],
        note: Callable[[str], None] = _log.info,
    ) -> None:
        """``meter`` measures the device's memory; ``estimate`` serves ops that cannot be run; ``note`` reports such."""
        self._device, self._meter, self._estimate, self._note = device, meter, estimate, note
        self._measured_by_signature: dict[Any, _Measured] = {}
        self._synthetic_inputs = SyntheticInputs()

    def costs(self, program: Program, graphs: Sequence[SegmentGraph], known_seconds: Sequence[float] = ()) -> OpCosts:
        """Return the measured costs of each op; ops that reject synthetic inputs get their roofline estimate.

        Args:
            program: the ops.
            graphs: whose they are.
            known_seconds: of each op, if known; then a CPU's ops run only once, for their scratch bytes.

        Raises:
            CaptureError: an operator does not behave as its schema says.
            DriverError: an operator broke the device for the whole process.
        """
        nodes = [node for graph in graphs for node in graph.ops]
        estimated = self._estimate(program)
        keys = [
            None if op.is_view or op.target == LOSS else _signature(node)
            for op, node in zip(program.ops, nodes, strict=True)
        ]
        to_time = {
            key: estimated.seconds[index]
            for index, key in enumerate(keys)
            if key and self._is_to_run(key, is_timed=not known_seconds)
        }
        num_timed, timed_seconds, all_seconds = 0, 0.0, sum(to_time.values())
        before_bytes = self._kept_bytes()
        seconds: list[float] = []
        pieces: list[tuple[Piece, ...]] = []
        with self._isolated():
            for op, node, key in zip(program.ops, nodes, keys, strict=True):
                if op.target == LOSS:
                    seconds.append(0.0)
                    pieces.append((Piece(assumed_bytes(program)),))
                    continue
                measured = _NOTHING if op.is_view else self._measure(node, key, is_timed=not known_seconds)
                if key in to_time:
                    num_timed, timed_seconds = num_timed + 1, timed_seconds + to_time.pop(key)
                    set_progress(num_timed, num_timed + len(to_time), timed_seconds / (all_seconds or 1.0))
                seconds.append(estimated.seconds[op.index] if measured.seconds is None else measured.seconds)
                pieces.append(measured.pieces)
        first_run_bytes = max(0, self._kept_bytes() - before_bytes)
        scratch_bytes = tuple(map(_scratch_bytes, pieces))
        return OpCosts(tuple(known_seconds or seconds), scratch_bytes, "measured", tuple(pieces), first_run_bytes)

    def _kept_bytes(self) -> int:
        self._meter.trim()
        return self._meter.other_bytes()

    def output_metadata(self, node: fx.Node) -> tuple[torch.Tensor, ...] | None:
        """Return the tensors that an op makes, without their memory; None if it rejects synthetic inputs."""
        with self._isolated():
            return self._measure(node).made

    def is_deterministic(self, node: fx.Node) -> bool:
        """Return whether an op's results are bitwise identical in each run, also in other threads.

        A CPU's kernels repeat. A GPU's may add in any order, and libraries select kernels by thread: an op that was not
        seen to repeat is not recomputed.
        """
        if self._device.type == "cpu":
            return True
        schema = schema_of(node.target)
        if schema is not None and schema.is_mutable:  # a repeated run would read other values
            return False
        with self._isolated():
            return self._measure(node).repeats

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        """Run ops for real in the middle of a trace, without effects on it."""
        on_gpu = self._device.type == "cuda"
        with (
            eager_dispatch(),
            torch.no_grad(),
            torch.cuda.device(self._device) if on_gpu else nullcontext(),
            torch.random.fork_rng([self._device] if on_gpu else []),
        ):
            yield

    def _measure(self, node: fx.Node, key: Any = None, *, is_timed: bool = True) -> _Measured:
        for maker in seed_ops(node):
            self._measure(maker)
        key = key or _signature(node)
        if self._is_to_run(key, is_timed=is_timed):
            found = _NOTHING if has_no_tensor_results(node) else self._run(node, is_timed=is_timed)
            self._measured_by_signature[key] = found
        self._synthetic_inputs.record_devices(node, self._measured_by_signature[key].devices)
        return self._measured_by_signature[key]

    def _is_to_run(self, key: Any, *, is_timed: bool) -> bool:
        """Whether the op of this signature was not measured yet, or ran only once and is to be timed."""
        measured = self._measured_by_signature.get(key)
        return measured is None or (is_timed and measured.seconds is None and measured.made is not None)

    def _run(self, node: fx.Node, *, is_timed: bool) -> _Measured:
        if str(node.target) in _LOOPS:
            return _REFUSED
        for _ in range(2):
            try:
                return self._try(node, is_timed=is_timed)
            except CaptureError:
                raise
            except torch.OutOfMemoryError:
                pass  # retried without what the error holds and torch caches
            except Exception as error:  # operators may reject synthetic inputs with any error
                raise_interrupt(error)
                self._check_device(node, error)
                _log.info("op %s rejects synthetic inputs, its cost is estimated: %s", node.target, error)
                return _REFUSED
            self._meter.trim()
        return self._too_large(node)

    def _try(self, node: fx.Node, *, is_timed: bool) -> _Measured:
        args, kwargs = self._synthetic_inputs.arguments(node)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if is_extension_op(node):
            check_schema(node, args, kwargs)
        if self._device.type == "cpu":
            trial = time_on_cpu(lambda: target(*args, **kwargs), self._meter, is_timed=is_timed)
            _check_storages(node, trial.made)
            measured = _measured(trial, None)
            return measured if is_timed else replace(measured, seconds=None)
        states = rng_states(self._device) if is_random(node) else None

        def run() -> Any:
            if states is not None:  # random ops repeat from the RNG state
                set_rng_states(states, self._device)
            return target(*args, **kwargs)

        trial = time_on_gpu(run, self._meter, self._device, compared=lambda made: not _is_idle_seed(node, made))
        _check_storages(node, trial.made)
        results = [nbytes for nbytes in _storage_bytes(trial.made) if nbytes > SMALL_BYTES]
        if trial.scratch_bytes <= SMALL_BYTES and len(results) < 2:  # a single allocation
            return _measured(trial, None)
        return _measured(trial, trace_allocations(lambda: tensors(run()), tensors((args, kwargs)), self._device))

    def _too_large(self, node: fx.Node) -> _Measured:
        nbytes = sum(_storage_bytes(tensors(node.meta.get("val"))))
        self._note(
            f"op '{node.name}' ({source_line(node)}) did not fit on the device for timing: its time is "
            f"estimated, and its scratch memory assumed to be that of its results, {format_bytes(nbytes)}"
        )
        return _Measured(None, (Piece(nbytes),), None, None, repeats=False)

    def _check_device(self, node: fx.Node, error: Exception) -> None:
        """Raise DriverError if the device is lost: then every later call would fail."""
        try:
            self._meter.synchronize()
        except RuntimeError as lost:
            reason = str(error).splitlines()[0]
            raise DriverError(
                f"op '{node.name}' ({source_line(node)}) broke the device when timed on synthetic inputs, and "
                f"this process cannot use the device any more: {reason}. Please report the op, {node.target}; "
                'lmswap.enable(model, compiler="eager") times none'
            ) from lost


def _measured(trial: Trial, pieces: tuple[Piece, ...] | None) -> _Measured:
    if pieces is None:  # not traced
        pieces = (Piece(trial.scratch_bytes),)
    made = tuple(map(_outline, trial.made))
    devices = tuple(tensor.device for tensor in trial.made)
    return _Measured(trial.seconds, pieces, made, devices, trial.repeats)


def _check_storages(node: fx.Node, made: Iterable[torch.Tensor]) -> None:
    """Raise CaptureError for quantized tensors and the like, which torch 2.13 may trace as plain ones."""
    other = next((tensor for tensor in made if not has_plain_storage(tensor.resolve_conj().resolve_neg())), None)
    if other is not None:
        raise CaptureError(
            f"op '{node.name}' ({source_line(node)}) makes a tensor of {other.dtype} in layout {other.layout}, whose "
            "bytes alone are not its values"
        )


def _scratch_bytes(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces if piece.result is None)


def _storage_bytes(values: Iterable[torch.Tensor]) -> list[int]:
    return list({storage_id(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in values}.values())


def _is_idle_seed(node: fx.Node, made: torch.Tensor) -> bool:
    """Return whether ``made`` may be the seed of a random op that is not random in this call: it stays unwritten."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return may_draw and not is_random(node) and not made.is_floating_point()


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(count, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _signature(node: fx.Node) -> Any:
    def describe(leaf: Any) -> Any:
        value = value_of(leaf) if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, fx.GraphModule):  # of a higher-order op
            return tuple(map(_signature, value.graph.nodes))
        if isinstance(value, torch.Tensor):
            return (value.dtype, tuple(value.shape), tuple(value.stride()), value.storage_offset(), str(value.device))
        return repr(value)

    leaves, spec = tree_flatten((node.args, node.kwargs))
    return (str(node.target), repr(spec), tuple(describe(leaf) for leaf in leaves))
