"""Detects enabled models that are trained but never called, and so not managed; warns at the first optimizer step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lmswap.errors import NotManaged
from lmswap.session.diagnostics import warn


class UncalledModels:
    """The enabled models that were not yet called with gradients on; hooks optimizer steps while there are any."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._handle: Any = None  # of the optimizer hook

    def add(self, model: nn.Module, name: str) -> None:
        """Add ``model``, just enabled; ``name`` is for the warning."""
        self._names[model] = name
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._warn_of_uncalled)

    def discard(self, model: nn.Module) -> None:
        """Remove ``model``, which was called or is not enabled any more; no effect if it is not there."""
        self._names.pop(model, None)
        if not self._names and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _warn_of_uncalled(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Warn of the models that ``optimizer``, which just took a step, has trained."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for model, name in list(self._names.items()):
            if any(id(parameter) in stepped for parameter in model.parameters()):
                self.discard(model)
                sentence = (
                    f"{name} is enabled, and an optimizer has trained it, but {name} itself was never called: lmswap "
                    "manages what model(...) runs, so the step took as much memory as without lmswap. Call model(...) "
                    "instead of another method or of what torch.compile has made of it, or enable the submodule that "
                    "is called"
                )
                warn(sentence, NotManaged)


UNCALLED_MODELS = UncalledModels()
