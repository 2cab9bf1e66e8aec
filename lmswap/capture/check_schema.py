"""Checks operators registered by extensions against their schemas, by running them.

Where memory is written or shared in other ways than a graph says, bytes would be swapped out before they are what eager
torch's backward reads, or one buffer would be taken for two. Where an operator resizes or replaces a storage, the size
of its buffers is in no graph: torch's own `inductor::resize_storage_bytes_` does so, which Dynamo traces for
``x.untyped_storage().resize_(0)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from lmswap.capture.lower import source_line
from lmswap.errors import CaptureError
from lmswap.torch_compat.operators import OpOverload, schema_of
from lmswap.torch_compat.pytree import tensors
from lmswap.torch_compat.tensors import storage_id
from lmswap.verify.bitwise import bitwise_equal

_ANNOTATE = "annotate its schema, as in Tensor(a!) for what is written"
_USE_HOOKS = 'saved-tensor hooks serve a model that moves its own memory: compiler="eager"'


def check_schema(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run the operator of ``node`` once on ``args`` and ``kwargs``.

    Raises:
        CaptureError: it resizes or replaces the storage of an argument, writes what its schema calls read-only, or
            returns memory of its arguments that its schema calls fresh.
    """
    target: OpOverload[..., Any] = node.target  # type: ignore[assignment]
    schema = schema_of(target)
    arguments, returns = schema.arguments, schema.returns
    by_name = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    given = [(argument, tensor) for argument in arguments for tensor in tensors(by_name.get(argument.name))]
    storages = [tensor.untyped_storage() for _, tensor in given]
    sizes = [storage.nbytes() for storage in storages]
    before = [(argument, tensor, tensor.clone()) for argument, tensor in given if not _writes(argument)]
    made = tensors(target(*args, **kwargs))
    for (argument, tensor), storage, nbytes in zip(given, storages, sizes, strict=True):
        _check_storage(node, argument.name, tensor, storage, nbytes)  # first: freed memory cannot be compared
    for argument, tensor, kept in before:
        if not bitwise_equal(tensor, kept):
            _refuse(node, f"writes its argument '{argument.name}', which its schema calls read-only", _ANNOTATE)
    own = {storage_id(storage) for storage in storages}
    is_fresh = all(value.alias_info is None for value in returns)
    if is_fresh and any(storage_id(tensor.untyped_storage()) in own for tensor in made):
        _refuse(node, "returns memory of its arguments, which its schema calls fresh", _ANNOTATE)


def _check_storage(node: fx.Node, name: str, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> None:
    """Refuse ``node`` if the argument ``name`` is no longer in ``storage`` of ``nbytes``."""
    found = tensor.untyped_storage()
    if storage_id(found) != storage_id(storage):
        _refuse(node, f"replaces the storage of its argument '{name}'", _USE_HOOKS)
    if found.nbytes() != nbytes:
        change = f"from {nbytes} to {found.nbytes()} bytes"
        _refuse(node, f"resizes the storage of its argument '{name}' {change}", _USE_HOOKS)


def _refuse(node: fx.Node, does: str, remedy: str) -> NoReturn:
    where = f"op '{node.name}' ({', '.join(filter(None, (str(node.target), source_line(node))))})"
    raise CaptureError(f"{where} {does}: nothing can be planned for it; {remedy}")


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
