"""What of inputs whose class handles torch's functions itself, to carry more than numbers, as MONAI's MetaTensor does?

Tracing looks into the class at each operator and finds code that no graph takes. To the class the model's call is one
function instead: it runs on the plain tensors, and the class dresses what comes out as it does for torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_dressed(value: Any) -> bool:
    """Whether its class handles torch's functions, as subclasses do by default; tracing knows those that hold others.

    A trace of a subclass with that default fails in torch 2.13 ("Multiple dispatch failed").
    """
    holds_others: bool = is_traceable_wrapper_subclass(value)
    if holds_others or not isinstance(value, torch.Tensor):
        return False
    handles = type(value).__torch_function__  # parameters and buffers do not
    return type(value) is not torch.Tensor and handles is not torch._C._disabled_torch_function_impl


def call_undressed(
    call: Callable[..., Any], dressed: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``call(*args, **kwargs)`` with plain tensors for those that are ``dressed``, of the same storage and history."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        undressed_args, undressed_kwargs = pytree.tree_map_only(is_dressed, _undress, (args, kwargs))
        with torch._C._EnableTorchFunction():  # or graphs would hold for these calls only
            return call(*undressed_args, **undressed_kwargs)

    return handle_torch_function(plain, dressed, *args, **kwargs)


def _undress(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)
