"""Global state, outside a model, that its trace depends on and no guard of Dynamo checks.

torch 2.13 guards neither the hooks of all modules (no upstream issue known) nor the kernels allowed for attention
(pytorch#185449 is the same in Inductor's cache).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from lmswap.torch_compat.modules import global_module_hooks

_CUDA = torch.backends.cuda
# Where a trace calls attention torch selects among these, and the trace contains the selected kernel.
_ATTENTION: tuple[Callable[[], bool], ...] = (
    _CUDA.flash_sdp_enabled,
    _CUDA.mem_efficient_sdp_enabled,
    _CUDA.math_sdp_enabled,
    _CUDA.cudnn_sdp_enabled,
)


class GlobalState(NamedTuple):
    """Global hooks of modules, by number, and the kernels allowed for attention."""

    hooks: tuple[int, ...]
    attention: tuple[bool, ...]

    @classmethod
    def now(cls) -> GlobalState:
        """Return the state in this thread."""
        flash, efficient, math, cudnn = _ATTENTION
        return cls(global_module_hooks(), (flash(), efficient(), math(), cudnn()))

    def changed(self, before: GlobalState, ops: Iterable[str]) -> str | None:
        """Return, as a sentence, what has changed since ``before``, when ``ops`` were traced, if it affects them."""
        if self.hooks != before.hooks:
            return "global hooks of modules (register_module_forward_hook etc.) changed after it was traced"
        if self.attention != before.attention and any("attention" in op for op in ops):
            return "torch.backends.cuda allows attention other kernels now than when it was traced"
        return None
