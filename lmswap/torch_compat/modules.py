"""`torch.nn.Module`: what its call runs, its own tensors, and the hooks of all modules."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

_Dict = dict[str, Tensor | None]
# The dicts of a module's own parameters and buffers; `parameters` and `buffers` make names first, which takes longer.
own_tensors: Callable[[nn.Module], tuple[_Dict, _Dict]] = operator.attrgetter("_parameters", "_buffers")


def all_own_tensors(model: nn.Module) -> list[Tensor | None]:
    """Return the parameters and buffers of ``model``; its `parameters` and `buffers` take several times as long."""
    tensors: list[Tensor | None] = []
    seen = set[int]()
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        parameters, buffers = own_tensors(module)
        tensors += parameters.values()
        tensors += buffers.values()
        left += module._modules.values()
    return tensors


def named_parameters(model: weakref.ref[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of ``model`` by all of their names, while it exists; faster than its `named_parameters`."""
    modules = _named_modules(model())
    own = ((path, name, each) for path, module in modules for name, each in own_tensors(module)[0].items())
    return {path + name: each for path, name, each in own if isinstance(each, nn.Parameter)}


def named_buffers(model: weakref.ref[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of ``model`` by all of their names, while it exists."""
    modules = _named_modules(model())
    own = ((path, name, each) for path, module in modules for name, each in own_tensors(module)[1].items())
    return {path + name: each for path, name, each in own if each is not None}


def _named_modules(model: nn.Module | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of ``model`` with the prefixes of their tensors' names."""
    left = [("", model)]
    while left:
        path, module = left.pop()
        if module is not None:
            yield path, module
            left += [(f"{path}{name}.", inner) for name, inner in reversed(module._modules.items())]


def eager_call(model: nn.Module) -> Callable[..., Any]:
    """Return what a call of ``model`` runs if nothing replaces it: hooks and forward."""
    call: Callable[..., Any] = model._call_impl
    return call


def compiled_call(model: nn.Module) -> Callable[..., Any] | None:
    """Return what a call of ``model`` runs instead of `eager_call`, as `nn.Module.compile` sets it."""
    call: Callable[..., Any] | None = model._compiled_call_impl
    return call


def set_compiled_call(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set what a call of ``model`` runs; None: `eager_call`."""
    model._compiled_call_impl = call


def global_module_hooks() -> tuple[int, ...]:
    """Return the numbers of the hooks of all modules, which are not reused; torch.nn checks them in each call."""
    return (
        *_module._global_forward_pre_hooks,
        *_module._global_forward_hooks,
        *_module._global_backward_pre_hooks,
        *_module._global_backward_hooks,
    )
