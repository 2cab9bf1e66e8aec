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
            if watched.was_trained_unmanaged(optimizer, model):
                self.discard(model)
                warn(watched.sentence, NotManaged)


class _Gradient:
    """The gradient of a parameter that an optimizer step used, and its version then."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self._gradient, self._version = weakref.ref(gradient), version_of(gradient)

    def is_same_as(self, other: _Gradient) -> bool:
        """Whether neither it was computed since the other step, nor anything added to it."""
        return self._gradient() is other._gradient() and self._version == other._version  # == compares their values


_AtStep = tuple[Hashable, _Gradient | None]  # what had run until a step of an optimizer, and a gradient that it used


class _Watched:
    def __init__(self, name: str, recorder: Recorder) -> None:
        self.num_calls = 0
        self._name, self._recorder = name, recorder
        self._at_enable: _AtStep = self._has_run(), None
        self._at_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, _AtStep] = weakref.WeakKeyDictionary()

    def was_trained_unmanaged(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
        """Whether a step of ``optimizer``, just taken, used gradients of ``model`` that nothing managed computed.

        A backward since its step before is managed, and so is a call: its backward may have run in parts. A step that
        calls that of its base class is seen twice, with the same gradients.
        """
        ran_before, gradient_before = self._at_step.get(optimizer, self._at_enable)
        ran, gradient = self._has_run(), _gradient_of(optimizer, model, gradient_before)
        self._at_step[optimizer] = ran, gradient
        if ran != ran_before or gradient is None:
            return False
        return gradient_before is None or not gradient.is_same_as(gradient_before)

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


def _gradient_of(optimizer: torch.optim.Optimizer, model: nn.Module, before: _Gradient | None) -> _Gradient | None:
    """Return one that ``optimizer`` used of ``model``: of the parameter as ``before``, if it still has any."""
    known = before.parameter() if before is not None else None
    if known is not None and known.grad is not None:
        return _Gradient(known, known.grad)
    own = set(map(id, model.parameters()))
    given = (p for group in optimizer.param_groups for p in group["params"] if id(p) in own)
    return next((_Gradient(p, p.grad) for p in given if p.grad is not None), None)


CALL_MONITOR = CallMonitor()
