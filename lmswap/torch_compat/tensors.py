"""Tensors and storages: identity, owners, kinds and layouts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["is_traceable_wrapper_subclass", "make_contiguous_strides_for", "suggest_memory_format"]

# A number that no other storage has while this one exists. C functions: they are called for each saved tensor.
storage_id: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
# A number that no other tensor has while this one exists, also of tensors without storage.
tensor_id: Callable[[Tensor], int] = operator.attrgetter("_cdata")
# Counts in-place changes; inference tensors have none.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
# The number of C++ owners of the storage with this `storage_id`.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
# The number of C++ owners of a tensor: its Python object is one, what DLPack exports and saved tensors are others.
tensor_use_count: Callable[[Tensor], int] = operator.methodcaller("_use_count")
# The dispatch keys of a tensor; ``raw_repr()`` of the result has a bit for each.
dispatch_keys: Callable[[Tensor], torch._C.DispatchKeySet] = torch._C._dispatch_keys
# As torch.from_dlpack, without 3 µs of argument checks.
from_dlpack: Callable[[Any], Tensor] = torch._C._from_dlpack
# Exchanges the contents of two tensors, which may have no weak references.
swap_tensors: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors
# Views of complex tensors with a pending conjugation or negation.
conjugated: Callable[[Tensor], Tensor] = torch._conj
negated: Callable[[Tensor], Tensor] = torch._neg_view

# Weak references to storages, as numbers, each to be freed. `StorageWeakRef` runs Python code when it is dropped, where
# the KeyboardInterrupt of a signal would be lost.
_STORAGES: Any = torch.UntypedStorage  # without type hints of its private methods
weak_storage: Callable[[torch.UntypedStorage], int] = _STORAGES._weak_ref
is_expired: Callable[[int], bool] = _STORAGES._expired
live_storage: Callable[[int], torch.UntypedStorage | None] = _STORAGES._new_with_weak_ptr  # None if it has expired
free_weak_storage: Callable[[int], None] = _STORAGES._free_weak_ref
# Exchanges the memory of two storages of one device and size: all tensors and views on them see it at once.
swap_data_pointers: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = _STORAGES._swap_data_ptr_


def key_bits(names: Iterable[str]) -> int:
    """Return the bits of the dispatch keys of these names; see `dispatch_keys`."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


def handles_torch_functions(kind: type[Tensor]) -> bool:
    """Return whether the tensor class ``kind`` implements ``__torch_function__``; parameters and buffers do not."""
    return kind is not Tensor and kind.__torch_function__ is not torch._C._disabled_torch_function_impl
