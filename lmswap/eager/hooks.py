"""Saved-tensor hooks around a call, whatever ends it, and around code that torch lets disable them.

Hooks are torch's, on a stack of each thread. torch.func's transforms (grad, vjp, jacrev, hessian, vmap) disable them
for as long as they run, and torch refuses that while any are pushed. Those of an enabled model may be disabled: what is
saved meanwhile stays on the device, as without lmswap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_Pair = tuple[Callable[..., Any], Callable[..., Any]]
_refuse_or_disable: Callable[..., None] = torch._C._autograd._saved_tensors_hooks_disable  # torch's


class _Pushed(threading.local):
    """The hooks of all enabled models in this thread."""

    def __init__(self) -> None:
        self.pairs: list[_Pair] = []


_PUSHED = _Pushed()


def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
    """Stand in for torch's function of the same signature, which does not fail because of hooks of enabled models."""
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    _refuse_or_disable(message, fail_if_non_empty and top not in _PUSHED.pairs)


def disabled_by() -> str | None:
    """What torch would say to who pushes hooks now, because they are disabled; None if they are not."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()


class Hooks(threading.local):
    """Those that one model pushes, a pair at a time.

    torch's own context is written in Python: where a signal comes just as it is left, its hooks stay, and would see
    what others save from then on.
    """

    _pushed: _Pair | None = None

    def __init__(self) -> None:
        # For good: threads share torch's module, and without hooks of an enabled model both do the same.
        torch._C._autograd._saved_tensors_hooks_disable = disable_hooks

    @contextmanager
    def on(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
        """Surrounds what saves tensors."""
        self._pushed = pair = pack, unpack
        _PUSHED.pairs.append(pair)
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Pops what was left behind, as by a second signal; nothing of this model runs in this thread."""
        left, self._pushed = self._pushed, None
        if left in _PUSHED.pairs:
            _PUSHED.pairs.remove(left)
        if left is not None and torch._C._autograd._top_saved_tensors_default_hooks(True) == left:
            torch._C._autograd._pop_saved_tensors_default_hooks()
