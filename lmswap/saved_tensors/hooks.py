"""Saved-tensor hooks that are removed whatever ends the call, and that torch's transforms may disable.

torch keeps one stack of hooks per thread. The transforms of torch.func (grad, vjp, jacrev, hessian, vmap) disable hooks
while they run, and torch raises if any are pushed then. Hooks of enabled models are exempt from that error: what is
saved meanwhile stays on the device, as without lmswap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lmswap.torch_compat.autograd import (
    disable_saved_tensor_hooks,
    hooks_disabled_message,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    replace_disable_hooks,
    top_saved_tensor_hooks,
)

_Pair = tuple[Callable[..., Any], Callable[..., Any]]


class _Pushed(threading.local):
    """The hooks of all enabled models in the current thread."""

    def __init__(self) -> None:
        self.pairs: list[_Pair] = []


_PUSHED = _Pushed()


def disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
    """Replace torch's function of the same signature; hooks of enabled models do not make it fail."""
    disable_saved_tensor_hooks(message, fail_if_non_empty and top_saved_tensor_hooks() not in _PUSHED.pairs)


def hooks_disabled_reason() -> str | None:
    """Return torch's message for pushing hooks while they are disabled, or None if they are enabled."""
    return hooks_disabled_message()


class Hooks(threading.local):
    """The hooks that one model pushes in the current thread, one pair at a time.

    A signal can leave them on the stack, where they would see tensors saved by other code, or remove them too early.
    """

    _pushed: _Pair | None = None

    def __init__(self) -> None:
        # Permanent: threads share torch's module, and without hooks of enabled models the behaviour is torch's.
        replace_disable_hooks(disable_hooks)

    def on(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Hooks:
        """Return the context in which these hooks are pushed: a generator would take as long as all else here."""
        self._pushed = pack, unpack
        return self

    def __enter__(self) -> None:
        pair = self._pushed
        assert pair is not None
        try:
            _PUSHED.pairs.append(pair)
            push_saved_tensor_hooks(*pair)
        except BaseException:
            self.pop_leftovers()
            raise

    def __exit__(self, *_: object) -> None:
        self.pop_leftovers()  # torch's context would raise where a signal has left nothing to pop

    def pop_leftovers(self) -> None:
        """Pop hooks that an interrupted `on` left; call it only while this model does not run in this thread."""
        left = self._pushed
        if left is not None and top_saved_tensor_hooks() == left:
            pop_saved_tensor_hooks()
        if left in _PUSHED.pairs:
            _PUSHED.pairs.remove(left)
        self._pushed = None  # last: a signal before leaves the rest to the next call
