"""The memory of trained parameters outside of a step: gradients that still exist, optimizer state, and updates."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, strided
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import register_optimizer_step_post_hook

from lmswap.ir.fixed_memory import TrainedMemory
from lmswap.runtime.storage import held_bytes
from lmswap.torch_compat.operators import eager_dispatch
from lmswap.torch_compat.optimizers import is_torchs_own
from lmswap.training_state.optimizer_trial import TemporaryValues, temporary_values

if TYPE_CHECKING:
    from lmswap.training_state.updates import Updates

# Values that an optimizer keeps per value of a parameter, by the settings of its group (torch 2.11 to 2.13).
_Settings = Mapping[str, Any]
_STATE: Mapping[type[Optimizer], Callable[[_Settings], int]] = {
    SGD: lambda group: int(group["momentum"] != 0),
    RMSprop: lambda group: 1 + (group["momentum"] > 0) + group["centered"],
    Adam: lambda group: 2 + group["amsgrad"],
    AdamW: lambda group: 2 + group["amsgrad"],
}
ASSUMED_VALUES = 2  # Adam's
_ASSUMED_TEMPORARIES = TemporaryValues(2, 1)  # of its loop


class TrainableParameters:
    """A model's parameters; trained are those that require gradients now."""

    def __init__(self, parameters: Callable[[], Iterable[Tensor]]) -> None:
        """``parameters`` returns them now; one of several names may be among them more than once."""
        self._parameters = parameters
        self.updates: Updates | None = None  # of optimizers that may stream
        self._temporary_values = weakref.WeakKeyDictionary[Optimizer, TemporaryValues]()
        self.unmeasured: list[str] = []  # sentences on optimizers of whose updates nothing is known
        self._was_stepped = False  # by an optimizer, since `start_watching_optimizer`
        self._stop_watching: Callable[[], object] | None = None

    @property
    def updated_in_chunks(self) -> Updates | None:
        """The updates that run in chunks; None if none do."""
        return self.updates if self.updates is not None and self.updates.run_in_chunks else None

    @property
    def streams_gradients(self) -> bool:
        """Whether their gradients are non-resident between backwards."""
        return self.updates is not None and self.updates.gradients.are_streamed

    @property
    def nbytes(self) -> int:
        """Bytes of those that are trained."""
        return sum(parameter.nbytes for parameter in self._trained())

    def have_gradients(self) -> bool:
        """Whether any of them has a gradient now."""
        return any(parameter.grad is not None for parameter in self._trained())

    def gradient_bytes(self) -> int:
        """Return the bytes of all their gradients on the device."""
        updates = self.updated_in_chunks
        gradients = [parameter.grad for parameter in self._alive() if parameter.grad is not None]
        return sum(held_bytes(each) for each in gradients if updates is None or not updates.is_non_resident(each))

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
        return any(id(parameter) in of_optimizer for parameter in self._trained())

    def measure(self, *, assumed_values: int = ASSUMED_VALUES) -> TrainedMemory:
        """Measure all parameters, their gradients and optimizer state, and what optimizers have yet to allocate.

        ``assumed_values`` per value of a parameter are pending where an optimizer is unknown, or none exists.
        """
        parameters = list(self._alive())
        optimizers = _optimizers()
        num_values, pending_bytes = _pending_values(optimizers, assumed_values), 0
        if (updates := self.updated_in_chunks) is not None:
            num_values |= dict.fromkeys(updates.streamed, 0)
            pending_bytes = updates.window_bytes()
        return TrainedMemory(
            sum(map(held_bytes, parameters)),
            self.gradient_bytes(),
            self._resident_state_bytes(optimizers, parameters),
            pending_bytes
            + sum(num_values.get(id(each), assumed_values) * each.nbytes for each in parameters if each.requires_grad),
        )

    def update_bytes(self, *, expects_optimizer: bool) -> int:
        """Return what updates that do not run in chunks take beside what is resident, and give back.

        Optimizers of other packages are assumed to take what Adam's loop does, and with ``expects_optimizer`` one that
        is yet to come for parameters that have none.
        """
        sizes = {id(each): each.nbytes for each in self._trained()}
        optimizers, nbytes, others = _optimizers(), 0, sizes.copy()  # libraries wrap a torch optimizer in their own
        for optimizer in filter(is_torchs_own, optimizers):
            groups = getattr(optimizer, "param_groups", ())
            updated = [[each for each in group["params"] if id(each) in sizes] for group in groups]
            if any(updated):
                nbytes = max(nbytes, temporary_bytes(groups, updated, self._temporary_values_of(optimizer)))
            for parameter in chain.from_iterable(updated):
                others.pop(id(parameter), None)
        known = others if expects_optimizer else _pending_values(optimizers, ASSUMED_VALUES)
        assumed = [each for number, each in others.items() if number in known]
        return max(nbytes, _loop_bytes(assumed, _ASSUMED_TEMPORARIES))

    def _temporary_values_of(self, optimizer: Optimizer) -> TemporaryValues:
        """Return `temporary_values`; none, which `unmeasured` says, if small copies cannot be updated."""
        if optimizer not in self._temporary_values:
            try:
                with eager_dispatch():  # also in the middle of a trace
                    self._temporary_values[optimizer] = temporary_values(optimizer)
            except Exception as error:  # LBFGS needs a closure, SparseAdam sparse gradients
                self._temporary_values[optimizer] = TemporaryValues()
                self.unmeasured.append(
                    f"temporary values of {type(optimizer).__name__} count as none: small copies of its parameters "
                    f"could not be updated to measure them ({type(error).__name__}: {error})"
                )
        return self._temporary_values[optimizer]

    def lack_optimizer(self) -> bool:
        """Whether some of them are trained by no optimizer of the process."""
        known = _pending_values(_optimizers(), ASSUMED_VALUES)
        return any(id(parameter) not in known for parameter in self._trained())

    def _resident_state_bytes(self, optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> int:
        """Return the bytes of ``optimizers``' state of ``parameters`` on the device; wrapped optimizers count once."""
        updates = self.updated_in_chunks
        found = {
            id(tensor): tensor.nbytes
            for optimizer in optimizers
            for parameter in parameters
            for tensor in state_tensors(optimizer, parameter)
            if updates is None or not updates.is_non_resident(tensor)
        }
        return sum(found.values())

    def _alive(self) -> Iterator[Tensor]:
        """Yield them once each; sparse ones, which have no `nbytes`, count nothing."""
        found = {id(parameter): parameter for parameter in self._parameters() if parameter.layout is strided}
        return iter(found.values())

    def _trained(self) -> Iterator[Tensor]:
        return (parameter for parameter in self._alive() if parameter.requires_grad)


def _optimizers() -> list[Optimizer]:
    """Return all optimizers of the process: what refers to a class of theirs, as its instances do.

    `gc.get_objects` would list every object of the process: 10 MiB and more once a graph was compiled.
    """
    classes = {Optimizer}
    new = [Optimizer]
    while new:
        new = [each for known in new for each in known.__subclasses__() if each not in classes]
        classes.update(new)
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), Optimizer)]


def state_tensors(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    """Return the state that ``optimizer`` has of ``parameter``, on its device."""
    state = getattr(optimizer, "state", {}).get(parameter)
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, Tensor) and value.device == parameter.device]


def temporary_bytes(
    groups: Sequence[_Settings], parameters: Sequence[Sequence[Tensor]], values: TemporaryValues
) -> int:
    """Return the bytes of temporaries of an update of ``parameters``, by group, that takes ``values``.

    Foreach implementations take those of all parameters of a group at once.
    """
    sizes = [[parameter.nbytes for parameter in updated] for updated in parameters]
    return max(
        (
            int(values.own * sum(each)) if is_foreach(group) else _loop_bytes(each, values)
            for group, each in zip(groups, sizes, strict=True)
        ),
        default=0,
    )


def _loop_bytes(sizes: Sequence[int], values: TemporaryValues) -> int:
    """Return the bytes of temporaries of an update of one parameter of ``sizes`` after the other."""
    return max((int(values.own * own + values.left * left) for left, own in pairwise([0, *sizes])), default=0)


def is_foreach(group: _Settings) -> bool:
    """Whether an update runs foreach implementations, as torch decides."""
    given: bool | None = group.get("foreach")
    return any(parameter.is_cuda for parameter in group["params"]) if given is None else given


def state_sizes(optimizer: Optimizer) -> dict[int, int]:
    """Return the bytes of ``optimizer``'s state by id of each parameter; of what does not exist yet, as expected."""
    pending = _pending_values([optimizer], ASSUMED_VALUES)
    return {
        id(each): pending[id(each)] * each.nbytes + sum(tensor.nbytes for tensor in state_tensors(optimizer, each))
        for group in optimizer.param_groups
        for each in group["params"]
    }


def _pending_values(optimizers: Sequence[Optimizer], assumed_values: int) -> dict[int, int]:
    """Return by id of each parameter of ``optimizers`` the state values, per value, that do not exist yet.

    The least of several optimizers counts: libraries wrap a torch optimizer in one of their own class.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        num_values = _STATE.get(type(optimizer))
        there = getattr(optimizer, "state", {})  # an optimizer under construction has none yet
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                pending = 0 if parameter in there else num_values(group) if num_values else assumed_values
                found[id(parameter)] = min(pending, found.get(id(parameter), pending))
    return found
