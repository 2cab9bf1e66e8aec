"""The memory of trained parameters outside of a step: gradients that still exist, and the optimizer's state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

# Values that an optimizer keeps per value of a parameter, by the settings of its group (torch 2.11 to 2.13).
_Settings = Mapping[str, Any]
_STATE: Mapping[type[Optimizer], Callable[[_Settings], int]] = {
    SGD: lambda group: int(group["momentum"] != 0),
    RMSprop: lambda group: 1 + (group["momentum"] > 0) + group["centered"],
    Adam: lambda group: 2 + group["amsgrad"],
    AdamW: lambda group: 2 + group["amsgrad"],
}
_STATE_OF_OTHERS = 2  # Adam's


class TrainableParameters:
    """A model's trained parameters, by weak references."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.nbytes = sum(parameter.nbytes for parameter in parameters)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._was_stepped = False  # by an optimizer, since `start_watching_optimizer`
        self._stop_watching: Callable[[], object] | None = None

    def have_gradients(self) -> bool:
        """Whether any of them has a gradient now."""
        return any(parameter.grad is not None for parameter in self._alive())

    def start_watching_optimizer(self) -> None:
        """Watch whether an optimizer takes a step, which parameters of foreach and fused ones do not show."""
        this = weakref.ref(self)

        def step_ended(optimizer: Optimizer, *_: Any) -> None:
            if (trained := this()) is not None:
                trained._was_stepped |= trained._are_some_of(optimizer)

        self.stop_and_check_stepped()
        self._stop_watching = weakref.finalize(self, register_optimizer_step_post_hook(step_ended).remove)

    def stop_and_check_stepped(self) -> bool:
        """Whether an optimizer has taken a step since `start_watching_optimizer`; stop watching."""
        if self._stop_watching is not None:
            self._stop_watching()
        seen, self._was_stepped = self._was_stepped, False
        return seen

    def _are_some_of(self, optimizer: Optimizer) -> bool:
        of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(id(parameter) in of_optimizer for parameter in self._alive())

    def pending_optimizer_bytes(self) -> int:
        """Return what optimizers have yet to allocate for them; two values per value if no optimizer is known."""
        num_values = _values_to_come()
        return sum(num_values.get(id(parameter), _STATE_OF_OTHERS) * parameter.nbytes for parameter in self._alive())

    def _alive(self) -> Iterator[Tensor]:
        return (parameter for found in self._parameters if (parameter := found()) is not None)


def _values_to_come() -> dict[int, int]:
    """Return by id of each parameter of a live optimizer the state values, per value, that do not exist yet.

    The least of several optimizers counts: libraries wrap a torch optimizer in one of their own class.
    """
    found: dict[int, int] = {}
    for optimizer in [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]:
        num_values = _STATE.get(type(optimizer), _of_others)
        there = getattr(optimizer, "state", {})  # an optimizer under construction has none yet
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                to_come = 0 if parameter in there else num_values(group)
                found[id(parameter)] = min(to_come, found.get(id(parameter), to_come))
    return found


def _of_others(_: _Settings) -> int:
    return _STATE_OF_OTHERS
