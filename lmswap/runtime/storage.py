"""Plain tensors, which can be copied as bytes: their storage holds their values."""

from __future__ import annotations

import torch

from lmswap.torch_compat.tensors import dispatch_keys, is_traceable_wrapper_subclass, key_bits

# Torch dispatches every other kind of tensor by a key of its own: zeros without memory (forward-mode AD), wrappers of
# torch.func's transforms, nested, sparse, quantized and MKL-DNN tensors, conjugated and negated views, fakes, and
# subclasses that handle operators themselves. A kind added by torch counts as not plain until it is listed here.
_KEYS = ("ADInplaceOrView", "CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA")
_OTHER_KEYS = ~key_bits(_KEYS)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a storage whose bytes, by dtype, shape, strides and offset, are its values."""
    return not dispatch_keys(tensor).raw_repr() & _OTHER_KEYS


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of ``tensor``; of one that wraps others, as quantized and sharded ones do, theirs."""
    wraps_others: bool = is_traceable_wrapper_subclass(tensor)
    if not wraps_others:
        return tensor.numel() * tensor.element_size()  # also of sparse ones, which have no nbytes
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = (getattr(tensor, name) for name in names)
    return sum(held_bytes(each) for each in inner if isinstance(each, torch.Tensor))
