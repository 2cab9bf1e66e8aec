"""Which operators does a trace leave whole that torch would write out in Python?

Torch traces `interpolate` as arithmetic on indices, `_unsafe_index`, and its gradient as `_unsafe_index_put`. Eager
torch has a kernel for each way: from 64³ to 128³ in the 3D U-Net the gradient of nearest takes 0.06 s instead of 0.28 s
on two cores, and trilinear saves none of the eight corners that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@contextmanager
def whole_operators() -> Iterator[None]:
    """Traces meanwhile what eager torch runs, for operators that resample."""
    taken = [(op, key, op.py_kernels.pop(key)) for op in _resampling() for key in _KEYS if key in op.py_kernels]
    for op, *_ in taken:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def _resampling() -> list[OpOverload]:
    kinds = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
    exact = tuple(f"_upsample_nearest_exact{sides}d" for sides in (1, 2, 3))
    packets = [getattr(torch.ops.aten, name) for name in (*(f"upsample_{kind}" for kind in kinds), *exact)]
    return [getattr(packet, overload) for packet in packets for overload in ("default", "vec")]
