"""Is an enabled model trained though it is never called? Nothing is managed then, as the first optimizer step tells."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lmswap.errors import NotManaged
from lmswap.session.notes import warn


class Uncalled:
    """The enabled models that were not yet called with gradients on. It looks on at optimizers while there are any."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._handle: Any = None  # torch's, of the hook

    def add(self, model: nn.Module, name: str) -> None:
        """``model`` is enabled; ``name`` is what people call it."""
        self._names[model] = name
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._look)

    def discard(self, model: nn.Module) -> None:
        """It was called, or is not enabled any more. Harmless if it is not known."""
        self._names.pop(model, None)
        if not self._names and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _look(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer has taken a step."""
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


UNCALLED = Uncalled()
