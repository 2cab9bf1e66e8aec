"""`torch.optim`: replacing what an optimizer's step runs between its hooks (torch 2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.optim import optimizer as _optimizer


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class of ``optimizer`` is one of torch's, and no subclass of a user or another package."""
    return type(optimizer).__module__.startswith("torch.optim.")


def update_of(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return what the step of ``optimizer`` runs between its hooks, to be called with ``optimizer``."""
    update: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    return update


def loaded_value(parameter: torch.Tensor, value: torch.Tensor, key: Any) -> torch.Tensor:
    """Return ``value`` of a saved state as `load_state_dict` puts it into the state of ``parameter``, under ``key``."""
    loaded: torch.Tensor = torch.optim.Optimizer._process_value_according_to_param_policy(
        parameter,
        value,
        0,
        [],  # the groups, by which it decides where steps are
        key,
    )
    return loaded


def replace_update(
    optimizer: torch.optim.Optimizer, update: Callable[[Callable[[], None]], None]
) -> Callable[[], None]:
    """Make ``optimizer.step`` call ``update(run)``, where it would call ``run``: the step without its hooks.

    Hooks, profiler records and learning-rate schedulers see one step, and a closure is called once.

    Returns:
        A function that restores the step, also if something has wrapped it meanwhile.
    """
    given = vars(optimizer).get("step")  # a scheduler's wrapper
    decorated, undecorated = type(optimizer).step, update_of(optimizer)
    is_replaced = True

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_replaced:
            return (given or MethodType(decorated, self))(*args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # as schedulers note that steps come first
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            arguments: tuple[Any, dict[str, Any]] = (self, *args), kwargs
            for hook in chain(_optimizer._global_optimizer_pre_hooks.values(), self._optimizer_step_pre_hooks.values()):
                arguments = hook(self, *arguments) or arguments
            (_, *positional), named = arguments
            closure = positional[0] if positional else named.get("closure")
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            update(lambda: undecorated(self))
            self._optimizer_step_code()
            for hook in chain(
                self._optimizer_step_post_hooks.values(), _optimizer._global_optimizer_post_hooks.values()
            ):
                hook(self, *arguments)
            return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made later leave it as it is
    replaced = MethodType(step, optimizer)
    optimizer.step = replaced  # type: ignore[method-assign]

    def restore() -> None:
        nonlocal is_replaced
        is_replaced = False
        if vars(optimizer).get("step") is replaced:
            del optimizer.step
            if given is not None:
                optimizer.step = given  # type: ignore[method-assign]

    return restore
