"""The autograd engine: its running node, callbacks, saved-tensor hooks, autocast and function transforms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from lmswap.torch_compat.operators import eager_dispatch

__all__ = ["peek_interpreter_stack"]  # the innermost transform of torch.func that runs in this thread, or None

Pack = Callable[..., Any]  # these two are saved-tensor hooks
Unpack = Callable[..., Any]

# The node that the current thread runs, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node
# The number of the backward that the current thread runs, or -1.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward will run a node: not if it computes other gradients only.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The position of a node in the order of creation in its thread: ready nodes run newest first.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
# The hooks that get a tensor's gradient before and after accumulation; empty or None without any. C functions: they are
# called for each parameter in each step.
hooks_before_accumulation: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
hooks_after_accumulation: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# A context without autocast, for any device.
disable_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
# A context in which `__torch_function__` of tensor subclasses is called, as at the top level.
enable_torch_function: Callable[[], AbstractContextManager[None]] = torch._C._EnableTorchFunction
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

push_saved_tensor_hooks: Callable[[Pack, Unpack], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
# torch's message for pushing hooks while a transform of torch.func disables them, else None.
hooks_disabled_message: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
# torch's own; `replace_disable_hooks` replaces what torch calls.
disable_saved_tensor_hooks: Callable[[str, bool], None] = torch._C._autograd._saved_tensors_hooks_disable


def gradient_accumulator(tensor: Tensor) -> Any:
    """Return the node that accumulates the gradient of ``tensor``, and owns it; None without one."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return None
    with torch.enable_grad(), eager_dispatch():  # also in the middle of a trace
        view: Any = tensor.view_as(tensor)
    return view.grad_fn.next_functions[0][0]


def top_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """Return the innermost hooks of this thread, also while a trace ignores them."""
    hooks: tuple[Pack, Unpack] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def replace_disable_hooks(disable: Callable[..., None]) -> None:
    """Have torch call ``disable``, for good, where it called `disable_saved_tensor_hooks`.

    The transforms of torch.func raise if hooks are active (torch 2.13; pytorch#146036, pytorch#187316).
    """
    torch._C._autograd._saved_tensors_hooks_disable = disable


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeping_dispatch_keys() -> AbstractContextManager[None]:
    """Restore this thread's dispatch keys at exit."""
    guard: Any = torch._C._ForceDispatchKeyGuard
    keys: AbstractContextManager[None] = guard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    )
    return keys


def in_forward_mode() -> bool:
    """Return whether a level of forward-mode AD is open."""
    return forward_ad._current_level >= 0


def forward_class(node: Any) -> Any:
    """Return the `torch.autograd.Function` whose backward ``node`` is, or None."""
    return getattr(node, "_forward_cls", None)
