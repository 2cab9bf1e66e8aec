"""What decides beside a model what its code computes, and is not looked at when a trace of it runs?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn.modules import module as torch_module

_CUDA = torch.backends.cuda
# Torch chooses among these where a trace calls attention, and the trace has the kernel that was chosen.
_ATTENTION: tuple[Callable[[], bool], ...] = (
    _CUDA.flash_sdp_enabled,
    _CUDA.mem_efficient_sdp_enabled,
    _CUDA.math_sdp_enabled,
    _CUDA.cudnn_sdp_enabled,
)


class Surroundings(NamedTuple):
    """Hooks of all modules that there are, by number, and which kernels attention may take."""

    hooks: tuple[int, ...]
    attention: tuple[bool, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """As they are in this thread."""
        # torch.nn asks itself, in each call of a module, whether there are any; their numbers do not come again.
        hooks = (
            *torch_module._global_forward_pre_hooks,
            *torch_module._global_forward_hooks,
            *torch_module._global_backward_pre_hooks,
            *torch_module._global_backward_hooks,
        )
        return cls(hooks, tuple(is_allowed() for is_allowed in _ATTENTION))

    def changed(self, before: Surroundings, ops: Iterable[str]) -> str | None:
        """What is another than ``before``, when ``ops`` were traced, and matters to them: a sentence for people."""
        if self.hooks != before.hooks:
            return "hooks of all modules (register_module_forward_hook and the like) came or went after it was traced"
        if self.attention != before.attention and any("attention" in op for op in ops):
            return "torch.backends.cuda allows attention other kernels now than when it was traced"
        return None
