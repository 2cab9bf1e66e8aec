"""What does each op cost and make on this device? Each distinct one is run two or three times on made-up tensors.

The inputs are made up: numbers from 0 to 1 for floats (valid as probabilities, which kernels of a GPU assert: after one
that fails, every later call of the process does), zeros for integers (valid as indices), coin flips for booleans, but
true for a single one, which may be asserted. Random state is left as it was found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lmswap.capture.blocks import scratch_blocks
from lmswap.capture.loss import assumed_bytes
from lmswap.capture.lower import is_foreign, tensors
from lmswap.capture.schemas import check_schema
from lmswap.errors import CaptureError
from lmswap.execute.graph import SegmentGraph
from lmswap.ir.costs import OpCosts
from lmswap.ir.places import SMALL_BYTES
from lmswap.ir.program import LOSS, Program

_log = logging.getLogger(__name__)

# First runs also pay for memory that is touched for the first time: on two cores of a virtual machine the backward of a
# convolution at 128³ took 0.63 s, then 0.25 s twice. Two runs are enough where an op takes longer than this; ops of
# microseconds need a warm cache too.
_TWICE_FROM_SECONDS = 0.05
_REPEATS = 3
_PATTERN = 2**16


class ScratchMeter(Protocol):
    """Tells how far a device's memory rose above what is held now."""

    def used_tensor_bytes(self) -> int:
        """Bytes of tensors now."""

    def peak_tensor_bytes(self) -> int:
        """Highest value since `reset_tensor_peak`."""

    def reset_tensor_peak(self) -> None:
        """Starts a new measurement."""

    def synchronize(self) -> None:
        """Waits until the device has run all that was asked of it."""


@dataclass(frozen=True)
class _Measured:
    seconds: float
    scratch_blocks: tuple[int, ...]
    made: tuple[torch.Tensor, ...]  # on the meta device


_NOTHING = _Measured(0.0, (), ())


class OpMeter:
    """Times ops of any number of programs on one device; each distinct op only once."""

    def __init__(self, device: torch.device, meter: ScratchMeter, estimate: Callable[[Program], OpCosts]) -> None:
        self._device, self._meter, self._estimate = device, meter, estimate
        self._known: dict[Any, _Measured | None] = {}  # None: it refused made-up inputs

    def costs(self, program: Program, graphs: Sequence[SegmentGraph]) -> OpCosts:
        """Seconds and scratch bytes of each op; where an op refuses made-up inputs its roofline estimate stands in.

        Raises:
            CaptureError: an operator does what its schema does not say.
        """
        nodes = [node for graph in graphs for node in graph.ops]
        estimated = self._estimate(program)
        seconds, blocks = [], []
        with self._alone():
            for op, node in zip(program.ops, nodes, strict=True):
                if op.target == LOSS:
                    measured: _Measured | None = _Measured(0.0, (assumed_bytes(program),), ())
                else:
                    measured = _NOTHING if op.is_view else self._measure(node)
                seconds.append(measured.seconds if measured else estimated.seconds[op.index])
                blocks.append(measured.scratch_blocks if measured else ())
        return OpCosts(tuple(seconds), tuple(map(sum, blocks)), "measured", tuple(blocks))

    def made(self, node: fx.Node) -> tuple[torch.Tensor, ...] | None:
        """The tensors that an op makes, without their memory; None where it refuses made-up inputs."""
        with self._alone():
            measured = self._measure(node)
        return measured.made if measured else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Runs ops for real, in the middle of a trace, and leaves nothing of it behind."""
        devices = [self._device] if self._device.type == "cuda" else []
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad(), torch.random.fork_rng(devices):
            yield

    def _measure(self, node: fx.Node) -> _Measured | None:
        key = _signature(node)
        if key not in self._known:
            try:
                self._known[key] = self._run(node)
            except CaptureError:
                raise
            except Exception as error:  # an operator may refuse made-up inputs with any error
                _log.info("op %s takes no made-up inputs, its cost is estimated: %s", node.target, error)
                self._known[key] = None
        return self._known[key]

    def _run(self, node: fx.Node) -> _Measured:
        storages: dict[int, torch.Tensor] = {}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: self._example(argument, storages))
        best, scratch = float("inf"), 0
        made: tuple[torch.Tensor, ...] = ()
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        if is_foreign(node):
            check_schema(node, args, kwargs)
        for repeat in range(_REPEATS):
            self._meter.synchronize()
            self._meter.reset_tensor_peak()
            start = time.perf_counter()
            result = target(*args, **kwargs)
            self._meter.synchronize()
            seconds = time.perf_counter() - start
            scratch = max(scratch, self._meter.peak_tensor_bytes() - self._meter.used_tensor_bytes())
            made = tuple(map(_outline, tensors(result)))
            del result
            best = min(best, seconds)
            if repeat and seconds > _TWICE_FROM_SECONDS:
                break
        return _Measured(best, self._blocks(max(scratch, 0), lambda: target(*args, **kwargs)), made)

    def _blocks(self, scratch_bytes: int, run: Callable[[], Any]) -> tuple[int, ...]:
        """The pieces of an op's scratch; where that is small, or nobody can tell, it is taken for one."""
        if self._device.type == "cuda" and scratch_bytes > SMALL_BYTES:
            found = scratch_blocks(run, self._device)
            if found is not None:
                return found
        return (scratch_bytes,)

    def _example(self, argument: fx.Node, storages: dict[int, torch.Tensor]) -> Any:
        return pytree.tree_map(
            lambda leaf: _example_tensor(leaf, storages) if isinstance(leaf, torch.Tensor) else leaf,
            argument.meta.get("val"),
        )


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(count, dtype=tensor.dtype, device="meta")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _signature(node: fx.Node) -> Any:
    def describe(leaf: Any) -> Any:
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            return (value.dtype, tuple(value.shape), tuple(value.stride()), value.storage_offset(), str(value.device))
        return repr(value)

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return (str(node.target), repr(spec), tuple(describe(leaf) for leaf in leaves))


def _example_tensor(fake: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """A real tensor of a fake one's geometry; fakes that share a storage get tensors that share one."""
    identity = fake.untyped_storage()._cdata
    if identity not in storages:
        count = max(1, fake.untyped_storage().nbytes() // fake.element_size())
        storages[identity] = torch.empty(count, dtype=fake.dtype, device=fake.device)
        _fill(storages[identity])
    view = torch.empty(0, dtype=fake.dtype, device=fake.device)
    return view.set_(storages[identity].untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())


def _fill(flat: torch.Tensor) -> None:
    """Fills with repeats of a short pattern: drawing 10⁸ numbers would take longer than most ops."""
    if not (flat.dtype is torch.bool or flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.zero_()
        return
    pattern = torch.empty(min(flat.numel(), _PATTERN), dtype=flat.dtype, device=flat.device)
    if flat.dtype is torch.bool:
        pattern.bernoulli_(0.5 if pattern.numel() > 1 else 1.0)
    elif pattern.dtype.is_complex:
        pattern.normal_()
    else:
        pattern.uniform_()
    whole = flat.numel() // pattern.numel() * pattern.numel()
    flat[:whole].view(-1, pattern.numel()).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])
