"""How do gradients reach autograd while the backward that makes them is still at work?

torch runs the backward of a captured region as one node, which gives all gradients at its end. Here it gives none, and
each gate behind it runs on to where its own are made::

    region's node ──► gate of the first part ──► its gradients: accumulated, hooks called, summed with other processes'
                  ──► gate of the second     ──► …

Of nodes that are ready autograd runs the newest first, and what accumulates gradients before any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmswap.errors import CaptureError
from lmswap.execute.parts import Handing, all_of

End = tuple[Any, int]  # the autograd node that takes a gradient, None for nobody, and as which of its inputs


class _Gate(torch.autograd.Function):
    """Passes tensors on; their gradients are those that come, or those that a backward makes for it."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.running = None  # the backward that this is a gate of, while it is at work
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.running is None:
            return given
        running, ctx.running = ctx.running, None
        return tuple(_sum(*pair) for pair in zip(given, running.run_to(id(ctx)), strict=True))


def pass_gate(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``tensors`` as they are, behind one gate."""
    apply: Callable[..., tuple[Tensor, ...]] = _Gate.apply
    return apply(*tensors)


class _Backward:
    """One run of a region's backward, which gates take the gradients of."""

    def __init__(self, handing: Handing, wanted: dict[int, list[int | None]]) -> None:
        """``wanted`` tells which results each gate passes on, by its id: it does not hold them, who hold it."""
        self._handing, self._wanted = handing, wanted
        self._made: dict[int, Any] = {}

    def run_to(self, gate: int) -> list[Tensor | None]:
        """The results that ``gate`` passes on; when it is the last, the backward is at its end.

        Raises:
            CaptureError: another step began meanwhile.
        """
        positions = self._wanted.pop(gate)
        with torch._C._DisableAutocast():  # as torch does around the region's node
            while any(position not in self._made for position in positions if position is not None):
                given = next(self._handing, None)
                if given is None:
                    raise CaptureError("a backward was still at work when the model's next step began: it is cut short")
                self._made |= given
                del given
            if not self._wanted:
                for _ in self._handing:
                    pass
        return [None if position is None else self._made.pop(position) for position in positions]


def hand_on(handing: Handing, num_results: int) -> Sequence[Any]:
    """What the region's node, which runs now, gives for its backward: nothing, where gates give it later."""
    gates = _gates(num_results)
    if not gates:
        return all_of(handing)
    running = _Backward(handing, {id(gate): wanted for gate, wanted in gates.items()})
    for gate in gates:
        gate.running = running
    return [None] * num_results


def behind_gate(end: End) -> End:
    """Who takes what ``end`` is given: gates only pass it on."""
    node, number = end
    behind: End = node.next_functions[number] if _is_gate(node) else end
    return behind


def _gates(num_results: int) -> dict[Any, list[int | None]]:
    """The gates that all results go through, and which; none if one goes elsewhere, or a gate will not run."""
    node: Any = torch._C._current_autograd_node()
    if torch.is_grad_enabled() or len(node.next_functions) != num_results:
        return {}
    numbers: dict[Any, dict[int, int]] = {}
    for number, (following, output) in enumerate(node.next_functions):
        if following is not None:
            numbers.setdefault(following, {})[output] = number
    if not all(_is_gate(gate) and _runs(gate) for gate in numbers):
        return {}
    return {gate: [at.get(output) for output in range(len(gate.next_functions))] for gate, at in numbers.items()}


def _is_gate(node: Any) -> bool:
    return getattr(node, "_forward_cls", None) is _Gate


def _runs(node: Any) -> bool:
    """Whether the backward that is under way will run ``node``: not if it is asked for other gradients only."""
    return torch._C._will_engine_execute_node(node)


def _sum(given: Tensor | None, made: Tensor | None) -> Tensor | None:
    if given is None or made is None:
        return made if given is None else given
    return given + made
