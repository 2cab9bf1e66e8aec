"""How do saved-tensor hooks surround a call, whatever ends it? They are torch's, on a stack of each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Hooks(threading.local):
    """Those that one model pushes, a pair at a time.

    torch's own context is written in Python: where a signal comes just as it is left, its hooks stay, and would see
    what others save from then on.
    """

    _pushed: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @contextmanager
    def on(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
        """Surrounds what saves tensors."""
        self._pushed = pack, unpack
        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self.take_back()

    def take_back(self) -> None:
        """Pops what was left behind, as by a second signal; nothing of this model runs in this thread."""
        left, self._pushed = self._pushed, None
        if left is not None and torch._C._autograd._top_saved_tensors_default_hooks(True) == left:
            torch._C._autograd._pop_saved_tensors_default_hooks()
