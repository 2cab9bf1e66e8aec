"""Detects enabled models that are trained without being called, and so not managed; warns at the optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lmswap.errors import NotManaged
from lmswap.runtime.recorder import Recorder
from lmswap.session.diagnostics import warn
from lmswap.torch_compat.tensors import version_of


class CallMonitor:
    """The enabled models whose training is not yet known to be unmanaged; hooks optimizer steps while there are any."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[nn.Module, _Watched] = weakref.WeakKeyDictionary()
        self._handle: Any = None  # of the optimizer hook

    def add(self, model: nn.Module, name: str, recorder: Recorder) -> None:
        """Add ``model``, just enabled; ``name`` is for the warning, ``recorder`` records its steps."""
        self._watched[model] = _Watched(name, recorder)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._check)

    def count_call(self, model: nn.Module) -> None:
        """Count a call of ``model`` with gradients on."""
        if (watched := self._watched.get(model)) is not None:
            watched.num_calls += 1

    def discard(self, model: nn.Module) -> None:
        """Remove ``model``, which was warned of or is not enabled any more; no effect if it is not there."""
        self._watched.pop(model, None)
        if not self._watched and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _check(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Warn of the models that ``optimizer``, which just took a step, has trained by what was not managed."""
        for model, watched in list(self._watched.items()):
            if not watched.has_run_since_step_of(optimizer) and watched.is_trained_by(optimizer, model):
                self.discard(model)
                warn(watched.sentence, NotManaged)


class _Watched:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.num_calls = 0
        self._name, self._recorder = name, recorder
        self._at_enable = self._has_run()
        self._at_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, Hashable] = weakref.WeakKeyDictionary()
        # By the `id` of a parameter, its gradient in a step before which nothing had run, and its version.
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def has_run_since_step_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a call or a backward has run since the last step of ``optimizer``; to be called once for each step.

        A backward alone is enough: its forward may have run before that step.
        """
        before, now = self._at_step.get(optimizer, self._at_enable), self._has_run()
        self._at_step[optimizer] = now
        if now != before:
            self._gradients.clear()
        return now != before

    def is_trained_by(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
        """Whether ``model``, of which nothing has run since a step of ``optimizer``, has new gradients nevertheless.

        A step that calls that of its base class, or runs in parts, is seen several times with the same gradients.
        """
        own = set(map(id, model.parameters()))
        given = (p for group in optimizer.param_groups for p in group["params"])
        stepped = [p for p in given if p.grad is not None and id(p) in own]
        if not self.num_calls:
            return bool(stepped)
        is_any_new = False
        for parameter in stepped:
            seen = weakref.ref(parameter.grad), version_of(parameter.grad)
            before = self._gradients.setdefault(id(parameter), seen)
            is_any_new |= before[0] is not seen[0] or before[1] != seen[1]  # == would compare the gradients
        return is_any_new

    def _has_run(self) -> Hashable:
        return self.num_calls, self._recorder.num_backwards

    @property
    def sentence(self) -> str:
        was_called = "not called since the optimizer step before" if self.num_calls else "never called"
        return (
            f"{self._name} is enabled, and an optimizer has trained it, but {self._name} itself was {was_called}: "
            "lmswap manages what model(...) runs, so the step took as much memory as without lmswap. Call model(...) "
            "instead of model.forward(...), of another method or of what torch.compile has made of it, or enable the "
            "submodule that is called"
        )


CALL_MONITOR = CallMonitor()
