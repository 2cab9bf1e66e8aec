"""Plain tensors, which can be copied as bytes: their storage holds their values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lmswap.torch_compat.tensors import dispatch_keys, is_traceable_wrapper_subclass, key_bits

# Torch dispatches every other kind of tensor by a key of its own: zeros without memory (forward-mode AD), wrappers of
# torch.func's transforms, nested, sparse, quantized and MKL-DNN tensors, conjugated and negated views, fakes, and
# subclasses that handle operators themselves. A kind added by torch counts as not plain until it is listed here.
_KEYS = ("ADInplaceOrView", "CPU", "AutogradCPU", "AutocastCPU", "CUDA", "AutogradCUDA", "AutocastCUDA")
_OTHER_KEYS = ~key_bits(_KEYS)


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a storage whose bytes, by dtype, shape, strides and offset, are its values."""
    return not dispatch_keys(tensor).raw_repr() & _OTHER_KEYS


def wraps_others(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` consists of others, which it names, as quantized and sharded ones do."""
    return bool(is_traceable_wrapper_subclass(tensor))


def parts(tensor: torch.Tensor) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the tensors that ``tensor`` wraps, each with its path of attributes.

    One that wraps none is its only part, with an empty path.
    """
    if not wraps_others(tensor):
        yield (), tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)
        for path, part in parts(inner) if isinstance(inner, torch.Tensor) else ():
            yield (name, *path), part


def moved_with_parts(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``; one that wraps others is built of its parts, without a copy of those there.

    Its own method ``to`` would copy all of them.
    """
    if not wraps_others(tensor):
        return tensor.to(device)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: moved_with_parts(getattr(tensor, name), device) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the `parts` of ``tensor``; sparse ones have no nbytes."""
    return sum(part.numel() * part.element_size() for _, part in parts(tensor))
