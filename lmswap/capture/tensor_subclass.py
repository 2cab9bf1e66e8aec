"""Inputs of tensor subclasses with ``__torch_function__``, which carry more than numbers, such as MONAI's MetaTensor.

A trace enters the class at each operator and finds code that no graph can hold. Therefore the class sees the model's
call as one function: it runs on plain tensors, and the class wraps its results as it does for torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function

from lmswap.torch_compat.autograd import enable_torch_function
from lmswap.torch_compat.pytree import tensors, tree_map_only
from lmswap.torch_compat.tensors import handles_torch_functions, is_traceable_wrapper_subclass

# Arguments of most models; their calls need no search in nested containers.
_PLAIN = frozenset((torch.Tensor, nn.Parameter, type(None), bool, int, float, str))


def torch_function_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among a call's arguments for which `has_torch_function` is true."""
    if _PLAIN.issuperset(map(type, (*args, *kwargs.values()))):
        return []
    return [tensor for tensor in tensors((args, kwargs)) if has_torch_function(tensor)]


def has_torch_function(value: Any) -> bool:
    """Return whether its class implements ``__torch_function__``, and is not a wrapper that tracing supports.

    A trace of a subclass with the default implementation fails ("Multiple dispatch failed"; torch 2.13, no upstream
    issue known).
    """
    holds_others: bool = is_traceable_wrapper_subclass(value)
    if holds_others or not isinstance(value, torch.Tensor):
        return False
    return handles_torch_functions(type(value))


def call_unwrapped(
    call: Callable[..., Any], wrapped: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return ``call(*args, **kwargs)`` with ``wrapped`` replaced by plain tensors that share storage and history."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        unwrapped_args, unwrapped_kwargs = tree_map_only(has_torch_function, _unwrap, (args, kwargs))
        with enable_torch_function():  # graphs would be specialized to it otherwise
            return call(*unwrapped_args, **unwrapped_kwargs)

    return handle_torch_function(plain, wrapped, *args, **kwargs)


def _unwrap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)
