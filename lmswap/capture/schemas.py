"""Does an operator that somebody registered with torch do what its schema says? Found out by running it.

Where memory is written or shared by others than a graph says, bytes would be copied out before they are what plain
torch's backward would read, or be taken for two buffers' that are one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from lmswap.capture.lower import source_line, tensors
from lmswap.errors import CaptureError


def check_schema(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs the operator of ``node`` once on ``args`` and ``kwargs``.

    Raises:
        CaptureError: it writes what its schema calls read-only, or returns memory of its arguments that its schema
            calls fresh.
    """
    target: torch._ops.OpOverload[..., Any] = node.target  # type: ignore[assignment]
    arguments, returns = target._schema.arguments, target._schema.returns
    by_name = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    read_only = [
        (argument.name, tensors(by_name.get(argument.name))) for argument in arguments if not _writes(argument)
    ]
    before = [(name, given, given.clone()) for name, values in read_only for given in values]
    made = tensors(target(*args, **kwargs))
    for name, given, kept in before:
        if not torch.equal(_bytes(given), _bytes(kept)):
            _refuse(node, f"writes its argument '{name}', which its schema calls read-only")
    storages = {given.untyped_storage()._cdata for given in tensors(by_name)}
    is_fresh = all(value.alias_info is None for value in returns)
    if is_fresh and any(tensor.untyped_storage()._cdata in storages for tensor in made):
        _refuse(node, "returns memory of its arguments, which its schema calls fresh")


def _refuse(node: fx.Node, does: str) -> NoReturn:
    where = f"op '{node.name}' ({', '.join(filter(None, (str(node.target), source_line(node))))})"
    raise CaptureError(
        f"{where} {does}: nothing can be planned for it; annotate its schema, as in Tensor(a!) for what is written"
    )


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
