"""Operators: schemas, direct calls, and how the Python dispatcher and modes replace them in traces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lmswap.torch_compat.resampling import resampling_kernels

__all__ = ["OpOverload", "TorchDispatchMode", "enable_python_dispatcher"]

# The keys of Python kernels that decompose an operator before autograd sees it.
_ABOVE_AUTOGRAD = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

is_nnpack_enabled: Callable[[], bool] = torch._C._get_nnpack_enabled


def schema_of(target: Any) -> Any:
    """Return the `torch.FunctionSchema` of what a node calls; None if that is no operator."""
    return getattr(target, "_schema", None)


def direct_call(op: OpOverload[..., Any]) -> Callable[..., Any]:
    """Return what ``op`` calls, without torch's Python wrapper."""
    return op._op


@contextmanager
def eager_dispatch() -> Iterator[None]:
    """Run operators within for real, also in the middle of a trace."""
    with _disable_current_modes(), no_python_dispatcher():
        yield


@contextmanager
def own_python_kernels(
    own: Mapping[OpOverload[..., Any], Callable[..., Any]], keep: Collection[OpOverloadPacket[..., Any]]
) -> Iterator[None]:
    """Remove torch's Python kernels above autograd, of which traces are made, except of ``keep``; use ``own`` ones.

    Resampling gets kernels that call its operator, see `lmswap.torch_compat.resampling`.

    torch 2.13 decomposes operators by these kernels whose eager kernels round differently; pytorch#117555 is on which
    keys they have, none is on their rounding.
    """
    known = _with_python_kernels()
    kernels = {(op, DispatchKey.Autograd): kernel for op, kernel in own.items()} | dict(resampling_kernels(known))
    changed = {op for op in known if op.overloadpacket not in keep} | {op for op, _ in kernels}
    removed = [(op, key, op.py_kernels.pop(key)) for op in changed for key in _ABOVE_AUTOGRAD if key in op.py_kernels]
    for (op, key), kernel in kernels.items():
        op.py_kernels[key] = kernel
    for op in changed:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key in kernels:
            del op.py_kernels[key]
        for op, key, kernel in removed:
            op.py_kernels[key] = kernel
        for op in changed:
            op._dispatch_cache.clear()


def _with_python_kernels() -> list[OpOverload[..., Any]]:
    packets = [value for value in vars(torch.ops.aten).values() if isinstance(value, OpOverloadPacket)]
    known = [value for packet in packets for value in vars(packet).values() if isinstance(value, OpOverload)]
    return [op for op in known if op.py_kernels]
