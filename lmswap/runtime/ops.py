"""Custom operators that lmswap inserts into graphs: swap copies and random ops; and the table of their engines.

Graphs refer to engines by number and hold no reference. Closed engines are not in the table, so that a graph still in
use raises a clear error.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lmswap.errors import TransferError
from lmswap.runtime import rng
from lmswap.torch_compat.tensors import conjugated, negated

if TYPE_CHECKING:
    from lmswap.runtime.engine import SwapEngine


ENGINES: weakref.WeakValueDictionary[int, SwapEngine] = weakref.WeakValueDictionary()
_parent_engines: set[int] = set()  # numbers of engines that a fork left to the parent process

_library = torch.library.Library("lmswap", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "swap_out_start(Tensor x, int engine, int buffer, str tier, int offset, int? start, ScalarType dtype, "
    "int[] size, int[] stride) -> Tensor",
    "swap_out_wait(Tensor token, Tensor x, int engine) -> ()",
    "swap_in_start(Tensor token, int engine, int buffer, int nbytes, Device device) -> Tensor",
    # By the alias annotations no copy is made: the result shares the swapped-in memory.
    "swap_in_wait(Tensor(a) flat, Tensor token, int engine) -> Tensor(a)",
    "weight_in_start(Tensor weight, int engine, int buffer, int nbytes, int offset, Device device) -> Tensor",
    "weight_in_wait(Tensor(a) flat, Tensor weight, int engine) -> Tensor(a)",
    "view_bytes(Tensor(a) flat, ScalarType dtype, int[] size, int[] stride, int offset, bool is_conj, bool is_neg)"
    " -> Tensor(a)",
    "rng_state(Device device) -> Tensor",
)
for _schema in _SCHEMAS:
    _library.define(_schema)  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "bernoulli(SymInt[] size, SymInt[] stride, float p, *, ScalarType dtype, Device device, Tensor? like=None)"
    " -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

swap_out_start = torch.ops.lmswap.swap_out_start.default
swap_out_wait = torch.ops.lmswap.swap_out_wait.default
swap_in_start = torch.ops.lmswap.swap_in_start.default
swap_in_wait = torch.ops.lmswap.swap_in_wait.default
weight_in_start = torch.ops.lmswap.weight_in_start.default
weight_in_wait = torch.ops.lmswap.weight_in_wait.default
view_bytes = torch.ops.lmswap.view_bytes.default
rng_state = torch.ops.lmswap.rng_state.default
bernoulli = torch.ops.lmswap.bernoulli.default

for _op in (swap_out_start, swap_out_wait, swap_in_start, swap_in_wait, weight_in_start, weight_in_wait):
    torch.fx.node.has_side_effect(_op)  # dead-code elimination must leave them alone


def find_engine(number: int) -> SwapEngine:
    """Return the engine of that number.

    Raises:
        TransferError: it was closed, or belongs to the process that this one was forked from.
    """
    engine = ENGINES.get(number)
    if engine is None and number in _parent_engines:
        raise TransferError(
            "this graph's tensors stayed with the process that this one was forked from: run the model's forward in "
            "the child too, after lmswap.enable there"
        )
    if engine is None:
        raise TransferError(
            "this graph's engine is closed: the model was disabled between a forward and its backward; zero the "
            "gradients and begin with a forward again"
        )
    return engine


def _leave_to_parent() -> None:
    """Clear the table in a forked child, where the engines' threads do not exist: a wait for them would never end."""
    _parent_engines.update(ENGINES)
    ENGINES.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _swap_out_start(  # noqa: PLR0917 - the operator's own signature
    x: torch.Tensor,
    engine: int,
    buffer: int,
    tier: str,
    offset: int,
    start: int | None,  # start of ``x`` in its storage, all of which is copied; None: only ``x`` is
    dtype: torch.dtype,
    size: list[int],
    stride: list[int],
) -> torch.Tensor:
    """Queue the swap-out of ``x``, traced as ``dtype``, ``size`` and ``stride``; see `SwapEngine.out_start`.

    Returns:
        The token, one int64 on the CPU: the only owner of the bytes in the tier.

    Raises:
        TransferError: ``x`` is not as traced, so its bytes could not be read back; or there is no such engine.
        TierError: the tier has no room.
    """
    if x.shape != tuple(size):  # seen: an index of embedding_bag in bfloat16 on the CPU
        raise TransferError(
            f"an operator made a tensor of shape {list(x.shape)} where torch traced {size}: its bytes could not be "
            'read back as what they are; use compiler="eager", or keep it resident with min_swap_bytes of more than '
            f"{math.prod(size) * dtype.itemsize}"
        )
    if x.stride() != tuple(stride) and _has_other_strides(x, stride):
        # Seen: sums with what depthwise convolutions of channels_last images give on the CPU.
        raise TransferError(
            f"an operator made strides {list(x.stride())} of shape {list(x.shape)} where torch traced {list(stride)}: "
            'its bytes would be read back in another order; use compiler="eager", or keep it resident with '
            f"min_swap_bytes of more than {x.nbytes}"
        )
    if x.dtype != dtype:  # seen: statistics of norms of bfloat16 by float32 weights on the CPU
        raise TransferError(
            f"an operator made {x.dtype} of shape {list(x.shape)} where torch traced {dtype}: its bytes could not be "
            f"read back as what they are; keep it resident with min_swap_bytes of more than {x.nbytes}"
        )
    if start is not None and x.storage_offset() != start and x.numel() > 0:
        raise TransferError(
            f"an operator made a tensor of shape {list(x.shape)} that begins at element {x.storage_offset()} of its "
            f'storage, where torch traced {start}: other bytes would be read back; use compiler="eager", or keep it '
            f"resident with min_swap_bytes of more than {x.untyped_storage().nbytes()}"
        )
    return find_engine(engine).out_start(x, buffer, tier, offset, start is None)


def _has_other_strides(x: torch.Tensor, stride: list[int]) -> bool:
    """Return whether the order of elements differs from that of ``stride``; strides of sizes of 1 are ignored."""
    strides = zip(x.shape, x.stride(), stride, strict=True)
    return x.numel() > 0 and any(size > 1 and real != traced for size, real, traced in strides)


def _swap_out_wait(token: torch.Tensor, x: torch.Tensor, engine: int) -> None:
    """See `SwapEngine.out_done`: after this op the memory of ``x`` may be reused."""
    find_engine(engine).out_done(token, x)


def _swap_in_start(token: torch.Tensor, engine: int, buffer: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """See `SwapEngine.in_start`; ``nbytes`` is for tracing only."""
    return find_engine(engine).in_start(token, buffer, device)


def _swap_in_wait(flat: torch.Tensor, token: torch.Tensor, engine: int) -> torch.Tensor:
    """See `SwapEngine.in_done`; returns ``flat``, whose bytes ops may read from here on."""
    find_engine(engine).in_done(token, flat)
    return flat


def _weight_in_start(  # noqa: PLR0917 - the operator's own signature
    weight: torch.Tensor, engine: int, buffer: int, nbytes: int, offset: int, device: torch.device
) -> torch.Tensor:
    """See `SwapEngine.weight_in_start`; ``device`` is for tracing only."""
    return find_engine(engine).weight_in_start(weight, buffer, nbytes, offset)


def _weight_in_wait(flat: torch.Tensor, weight: torch.Tensor, engine: int) -> torch.Tensor:
    """See `SwapEngine.weight_in_done`; returns ``flat``, whose bytes ops may read from here on."""
    find_engine(engine).weight_in_done(flat)
    return flat


def _view_bytes(  # noqa: PLR0917 - the operator's own signature
    flat: torch.Tensor,
    dtype: torch.dtype,
    size: list[int],
    stride: list[int],
    offset: int,
    is_conj: bool,
    is_neg: bool,
) -> torch.Tensor:
    """Return the tensor whose bytes ``flat`` holds; ``offset`` is in elements of ``dtype`` from its first byte."""
    begin = flat.storage_offset() * flat.element_size() // dtype.itemsize  # offset counts from the tensor's own bytes
    view = torch.empty(0, dtype=dtype, device=flat.device)
    view.set_(flat.untyped_storage(), begin + offset, size, stride)
    # Complex views store pending operations on their elements in flags, not in memory.
    view = conjugated(view) if is_conj else view
    return negated(view) if is_neg else view


# Copies as called by generated code, bypassing torch's dispatcher, which takes a third to a half of a swap's host time.
# On the emulated GPU, 6,400 swaps each way, in turns: at least 174 us a swap through it, 100 without.
COPIES: dict[object, Callable[..., Any]] = {
    swap_out_start: _swap_out_start,
    swap_out_wait: _swap_out_wait,
    swap_in_start: _swap_in_start,
    swap_in_wait: _swap_in_wait,
    weight_in_start: _weight_in_start,
    weight_in_wait: _weight_in_wait,
    view_bytes: _view_bytes,
}

# What tracers see of each: its results without bytes.
_FAKES: dict[Any, Callable[..., Any]] = {
    swap_out_start: lambda *_: torch.empty(1, dtype=torch.int64, device="cpu"),
    swap_out_wait: lambda *_: None,
    swap_in_start: lambda token, engine, buffer, nbytes, device: _bytes_on(device, nbytes),
    swap_in_wait: lambda flat, *_: flat,
    weight_in_start: lambda weight, engine, buffer, nbytes, offset, device: _bytes_on(device, nbytes),
    weight_in_wait: lambda flat, *_: flat,
    rng_state: lambda device: _bytes_on("cpu", rng.rng_state(device).numel()),
    bernoulli: lambda size, stride, p, *, dtype, device, like=None: rng.memory_for(size, stride, dtype, device, like),
}


def _bytes_on(device: torch.device | str, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


for _operator, _kernel in (COPIES | {rng_state: rng.rng_state, bernoulli: rng.bernoulli}).items():
    _library.impl(_operator, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
for _operator, _fake in _FAKES.items():
    torch.library.register_fake(_operator, _fake, lib=_library)
