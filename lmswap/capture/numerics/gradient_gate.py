"""Gates: autograd nodes that pass gradients on while the captured backward that computes them is still running.

torch runs the backward of a captured region as one node, which returns all gradients at its end (torch 2.13; by design,
pytorch#144376 is on their order). Here it returns none, and each gate after it runs the backward up to its own
gradients::

    region's node ──► gate of the first part ──► its gradients: accumulated, hooks called, all-reduced
                  ──► gate of the second     ──► …

Of ready nodes autograd runs the newest first, and nodes that accumulate gradients before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmswap.errors import CaptureError
from lmswap.runtime.partial_backward import PartialResults, collect
from lmswap.torch_compat.autograd import current_node, disable_autocast, forward_class, will_execute

Edge = tuple[Any, int]  # the autograd node that takes a gradient, or None, and its input's number


class _Gate(torch.autograd.Function):
    """An identity; its gradients are those that arrive, or those that a running backward computes for it."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.running = None  # the running backward that this is a gate of
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.running is None:
            return given
        running, ctx.running = ctx.running, None
        return tuple(_add(*pair) for pair in zip(given, running.run_to(id(ctx)), strict=True))


def insert_gate(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return ``tensors`` as outputs of one gate."""
    apply: Callable[..., tuple[Tensor, ...]] = _Gate.apply
    return apply(*tensors)


class _RunningBackward:
    """One run of a region's backward, whose gradients gates take."""

    def __init__(self, partial_results: PartialResults, wanted: dict[int, list[int | None]]) -> None:
        """``wanted``: by a gate's id, the results that it passes on; the gates own this object, not vice versa."""
        self._results, self._wanted = partial_results, wanted
        self._made: dict[int, Any] = {}

    def run_to(self, gate: int) -> list[Tensor | None]:
        """Run until ``gate``'s results are computed, or to the end for the last gate, and return them.

        Raises:
            CaptureError: another step began meanwhile.
        """
        positions = self._wanted.pop(gate)
        with disable_autocast():  # as torch does around the region's node
            while any(position not in self._made for position in positions if position is not None):
                given = next(self._results, None)
                if given is None:
                    raise CaptureError("a backward was still running when the model's next step began: it was ended")
                self._made |= given
                del given
            if not self._wanted:
                for _ in self._results:
                    pass
        return [None if position is None else self._made.pop(position) for position in positions]


def dispatch_gradients(partial_results: PartialResults, num_results: int, tensors: Sequence[int]) -> Sequence[Any]:
    """Return the gradients of the region's running node: all, or None for each if gates deliver them later.

    ``tensors`` are the positions of the inputs that are tensors, among as many as there are results.
    """
    gates = _gates(tensors)
    if not gates:
        return collect(partial_results)
    running = _RunningBackward(partial_results, {id(gate): wanted for gate, wanted in gates.items()})
    for gate in gates:
        gate.running = running
    return [None] * num_results


def skip_gate(edge: Edge) -> Edge:
    """Return the node that gets what ``edge`` is given, after a gate if there is one."""
    node, number = edge
    behind: Edge = node.next_functions[number] if _is_gate(node) else edge
    return behind


def _gates(tensors: Sequence[int]) -> dict[Any, list[int | None]]:
    """Return, by gate, the result for each of its outputs, or None; empty unless each result's gate will run."""
    node: Any = current_node()
    if torch.is_grad_enabled() or len(node.next_functions) != len(tensors):
        return {}
    numbers: dict[Any, dict[int, int]] = {}
    for position, (following, output) in zip(tensors, node.next_functions, strict=True):
        if following is not None:
            numbers.setdefault(following, {})[output] = position
    if not all(_is_gate(gate) and will_execute(gate) for gate in numbers):
        return {}
    return {gate: [at.get(output) for output in range(len(gate.next_functions))] for gate, at in numbers.items()}


def _is_gate(node: Any) -> bool:
    return forward_class(node) is _Gate


def _add(given: Tensor | None, made: Tensor | None) -> Tensor | None:
    if given is None or made is None:
        return made if given is None else given
    return given + made
