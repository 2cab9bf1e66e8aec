"""Does an operator that somebody registered with torch do what its schema says? Found out by running it.

Where memory is written or shared by others than a graph says, bytes would be copied out before they are what plain
torch's backward would read, or be taken for two buffers' that are one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lmswap.capture.lower import source_line, tensors
from lmswap.errors import CaptureError


def checked(node: fx.Node) -> Callable[..., Any]:
    """Runs the operator of ``node``.

    Raises:
        CaptureError: by what is returned, if the operator writes what its schema calls read-only, or returns memory of
            its arguments that its schema calls fresh.
    """
    target: torch._ops.OpOverload = node.target  # type: ignore[assignment]
    arguments, returns = target._schema.arguments, target._schema.returns
    is_fresh = all(value.alias_info is None for value in returns)

    def run(*args: Any, **kwargs: Any) -> Any:
        by_name = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
        read_only = {
            argument.name: tensors(by_name.get(argument.name)) for argument in arguments if not _writes(argument)
        }
        before = [(name, given, given.clone()) for name, values in read_only.items() for given in values]
        result = target(*args, **kwargs)
        for name, given, kept in before:
            if not torch.equal(_bytes(given), _bytes(kept)):
                raise CaptureError(
                    f"{_where(node)} writes its argument '{name}', which its schema calls read-only: {_REMEDY}"
                )
        given_storages = {given.untyped_storage()._cdata for given in tensors(by_name)}
        if is_fresh and any(made.untyped_storage()._cdata in given_storages for made in tensors(result)):
            raise CaptureError(
                f"{_where(node)} returns memory of its arguments, which its schema calls fresh: {_REMEDY}"
            )
        return result

    return run


_REMEDY = "what it does cannot be planned for; annotate its schema, as in Tensor(a!) for what is written"


def _where(node: fx.Node) -> str:
    return f"op '{node.name}' ({', '.join(filter(None, (str(node.target), source_line(node))))})"


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
