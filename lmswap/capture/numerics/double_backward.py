"""Detects double backward: gradients of captured graphs computed with create_graph=True, refused when differentiated.

The backward graphs of torch.compile have no backward of their own (torch 2.13; pytorch#91469). torch raises, too, but
without the model's name and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmswap.errors import DoubleBackward
from lmswap.runtime.codegen import captured_node
from lmswap.runtime.storage import has_plain_storage
from lmswap.torch_compat.autograd import current_node
from lmswap.torch_compat.dynamo import untraced

Gradients = tuple[Tensor | None, ...]


def detect_double_backward(
    outputs: Iterable[Any], message: Callable[[], str], note_arriving: Callable[[Gradients], None]
) -> None:
    """Call ``message`` when a backward with create_graph=True has passed the graph that returned ``outputs``.

    Args:
        outputs: of one call of a graph.
        message: returns the message of the DoubleBackward that is raised when those gradients are differentiated;
            for a batch of gradients (is_grads_batched) it is raised at once.
        note_arriving: gets the gradients of each backward before it runs.
    """
    node = next(filter(None, map(captured_node, outputs)), None)
    if node is None:
        return

    def begins(given: Gradients) -> None:
        note_arriving(given)
        if torch.is_grad_enabled():
            # A batch of gradients (legacy vmap) is differentiated below its wrapper, where no node of ours would be.
            if not all(gradient is None or has_plain_storage(gradient) for gradient in given):
                raise DoubleBackward(message())
            # Registered only now: for a post hook autograd keeps the node's inputs until it has run.
            running: Any = current_node()  # `node` in a closure of its own hook would be a cycle
            handles.append(running.register_hook(ran))

    def ran(gradients: Gradients, _: Gradients) -> Gradients:
        handles.pop().remove()
        sentence = message()
        apply: Callable[[Tensor, str], Tensor] = _NotDifferentiable.apply
        return tuple(None if gradient is None else apply(_differentiable(gradient), sentence) for gradient in gradients)

    handles: list[Any] = []
    node.register_prehook(partial(_untraced, begins))


@untraced  # a model may run a backward where Dynamo traces it
def _untraced(hook: Callable[[Gradients], None], given: Gradients) -> None:
    hook(given)


def _differentiable(gradient: Tensor) -> Tensor:
    """Return ``gradient``, requiring gradients: some do not, and would be taken for constants (torch 2.11)."""
    return gradient if gradient.requires_grad else gradient.detach().requires_grad_()


class _NotDifferentiable(torch.autograd.Function):
    """An identity that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sentence: str) -> Tensor:
        ctx.sentence = sentence
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DoubleBackward(ctx.sentence)
