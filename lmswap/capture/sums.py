"""Which gradients does a backward sum by itself, and autograd goes on to sum? Noticed: plain torch adds in one row.

Plain torch has ``(elsewhere + first use) + second use``, a graph ``elsewhere + (first use + second use)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from lmswap.capture.arrival import taker
from lmswap.capture.gates import End
from lmswap.capture.whole import ROUNDED_OTHERWISE
from lmswap.execute.parts import Handing, Results


class SummedInside:
    """Watches the gradients that a backward graph sums of several uses, for others that are added to them."""

    def __init__(self, backward: fx.Graph, note: Callable[[str], None]) -> None:
        """``note`` is given a sentence for people when that is seen first."""
        (output,) = backward.find_nodes(op="output")
        self._positions = [position for position, result in enumerate(output.args[0]) if _is_sum(result)]
        self._note = note
        self._is_told = False
        self._handles: dict[int, RemovableHandle] = {}  # by position; a backward may not get as far as some nodes

    def watch(self, handing: Handing) -> Handing:
        """``handing`` as it is, of the region's node that autograd runs now."""
        if self._is_told or not self._positions:
            return handing
        node: Any = torch._C._current_autograd_node()
        ends: dict[int, End] = {position: node.next_functions[position] for position in self._positions}

        def look(given: Results) -> Results:
            for position in given.keys() & ends.keys():
                self._expect(ends[position], position, given[position])
            return given

        return map(look, handing)  # which holds nothing of what was given

    def _expect(self, end: End, position: int, gradient: Tensor | None) -> None:
        """Looks at what ``end`` is given in this backward: ``gradient`` alone, or with others added to it."""
        if gradient is None:
            return
        node, number = taker(end, gradient.shape)
        if node is None or _is_hooked(node):
            return
        passed, shape, backward = _identity(gradient), tuple(gradient.shape), torch._C._current_graph_task_id()
        if position in self._handles:
            self._handles[position].remove()

        def arrives(arrived: tuple[Tensor | None, ...]) -> None:
            handle.remove()
            found = arrived[number]
            is_another = backward != torch._C._current_graph_task_id()
            if self._is_told or is_another or found is None or _identity(found) == passed:
                return
            self._is_told = True
            self._note(
                f"{ROUNDED_OTHERWISE}: a graph uses a tensor of {list(shape)} several times and adds those gradients "
                "up before others are added, as of a penalty on tied weights; plain torch adds all in one row"
            )

        disable: Callable[..., Any] = torch.compiler.disable  # a model may run a backward where Dynamo traces it
        handle = self._handles[position] = node.register_prehook(disable(arrives))


def _is_sum(result: Any) -> bool:
    return isinstance(result, fx.Node) and result.target is torch.ops.aten.add.Tensor


def _is_hooked(node: Any) -> bool:
    """Whether a parameter's own hooks may put another gradient in the place of the sum."""
    return bool(getattr(getattr(node, "variable", None), "_backward_hooks", None))


def _identity(gradient: Tensor) -> tuple[int, int]:
    """Another where something was added, in place or not."""
    return gradient.data_ptr() if gradient.layout is torch.strided else id(gradient), gradient._version
