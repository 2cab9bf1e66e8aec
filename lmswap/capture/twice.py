"""Are gradients of captured graphs differentiated once more? Noticed when they are made so, refused when they are.

The backward graphs of torch.compile have no backward of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmswap.errors import DoubleBackward
from lmswap.execute.graph import is_captured
from lmswap.execute.storage import has_plain_storage

Gradients = tuple[Tensor | None, ...]

_MOST_VIEWS = 8  # between an output and that node


def watch_gradients(outputs: Iterable[Any], notice: Callable[[], str]) -> None:
    """Calls ``notice`` when a backward with create_graph=True has gone through the graph that gave ``outputs``.

    What it returns is the DoubleBackward that whoever differentiates those gradients gets; of a batch of gradients
    (is_grads_batched), whoever asks for them.
    """
    node = next(filter(None, map(_captured_node, outputs)), None)
    if node is None:
        return

    def begins(given: Gradients) -> None:
        if torch.is_grad_enabled():
            # A batch of gradients (legacy vmap) is differentiated below its wrapper, where no node of ours would be.
            if not all(gradient is None or has_plain_storage(gradient) for gradient in given):
                raise DoubleBackward(notice())
            # Only now: for a hook that runs after it, autograd would keep what the node was given until then.
            running: Any = torch._C._current_autograd_node()  # `node` would own itself
            handles.append(running.register_hook(ran))

    def ran(gradients: Gradients, _: Gradients) -> Gradients:
        handles.pop().remove()
        sentence = notice()
        apply: Callable[[Tensor, str], Tensor] = _Once.apply
        return tuple(None if gradient is None else apply(_differentiable(gradient), sentence) for gradient in gradients)

    handles: list[Any] = []
    node.register_prehook(partial(_untraced, begins))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a model may run a backward where Dynamo traces it
def _untraced(hook: Callable[[Gradients], None], given: Gradients) -> None:
    hook(given)


def _differentiable(gradient: Tensor) -> Tensor:
    """With torch 2.11 some are not, and would be taken for constants: nobody would hear of it."""
    return gradient if gradient.requires_grad else gradient.detach().requires_grad_()


class _Once(torch.autograd.Function):
    """Gives a gradient as it is, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sentence: str) -> Tensor:
        ctx.sentence = sentence
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DoubleBackward(ctx.sentence)


def _captured_node(output: Any) -> Any:
    """The node of the graph that ``output`` comes from, through views that were taken of it; None if there is none."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    for _ in range(_MOST_VIEWS):
        if node is None or is_captured(node):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None
