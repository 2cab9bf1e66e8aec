"""Plain tensors, which can be copied as bytes: their storage holds their values."""

from __future__ import annotations

import functools
import operator

import torch

# Torch dispatches every other kind of tensor by a key of its own: zeros without memory (forward-mode AD), wrappers of
# torch.func's transforms, nested, sparse, quantized and MKL-DNN tensors, conjugated and negated views, fakes, and
# subclasses that handle operators themselves. A kind added by torch counts as not plain until it is listed here.
_KEYS = ("ADInplaceOrView", "CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA")
_OTHER_KEYS: int = ~functools.reduce(
    operator.or_, (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr() for key in _KEYS)
)
_dispatch_keys = torch._C._dispatch_keys  # called for each tensor that autograd saves


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a storage whose bytes, by dtype, shape, strides and offset, are its values."""
    return not _dispatch_keys(tensor).raw_repr() & _OTHER_KEYS
