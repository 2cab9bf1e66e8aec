"""Memory that a budget counts beside the tensors of a step, as `lmswap.enable` counted it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from lmswap.errors import CaptureError

MAX_BYTES = 2**46  # more than any machine has; sums over any program stay exact in 64 bits

# What a budget counts, and from when, by the type of its device.
COUNTED = {"cpu": "growth of resident memory since enable, less code", "cuda": "all that torch reserves on the GPU"}
_AND_PARAMETERS = f"the model's parameters, and {COUNTED['cpu']}"


def counted(device_type: str, *, parameters: bool = False) -> str:
    """What the budget of a device counts, and from when; on a CPU the model's parameters only if they are placed."""
    return _AND_PARAMETERS if device_type == "cpu" and parameters else COUNTED.get(device_type, "")


class TrainedMemory(NamedTuple):
    """Bytes of a model's parameters, of what a budget counts of their gradients and optimizer state, and of the rest.

    ``pending_optimizer_bytes`` are those of state that optimizers have yet to allocate.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    pending_optimizer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """What was in use before the step, what was reserved for later, and the margins that stay free.

    ``device_type``, "cpu" or "cuda", says what the budget counts, see `COUNTED`; "" in files that do not say it. On a
    CPU it counts parameters where plans place weights.
    """

    before_bytes: int = 0
    reserve_bytes: int = 0
    margin_bytes: int = 0
    unmoved_margin_bytes: int = 0  # the margin of a step that neither swaps nor recomputes
    parameter_bytes: int = 0  # of the model; in use before the step, but on a CPU not counted
    gradient_bytes: int = 0  # that were in use before the step, as were the next
    optimizer_bytes: int = 0
    pending_optimizer_bytes: int = 0  # of what was reserved: for state that does not exist yet
    device_type: str = ""
    counts_parameters: bool = False  # on a CPU; on a GPU always

    def __post_init__(self) -> None:
        if self.device_type not in ("", *COUNTED):
            raise CaptureError(f"device_type cannot be {self.device_type!r}")
        for name in (field.name for field in fields(self) if field.type == "int"):
            if not 0 <= getattr(self, name) <= MAX_BYTES:
                raise CaptureError(f"{name} cannot be {getattr(self, name)}")

    @property
    def counted(self) -> str:
        """What the budget counts, and from when; "" where that is not known."""
        return counted(self.device_type, parameters=self.counts_parameters)

    @property
    def uncounted_bytes(self) -> int:
        """Parameters that existed before a budget for growth, as on a CPU."""
        return self.parameter_bytes if self.device_type == "cpu" and not self.counts_parameters else 0

    def total_bytes(self, *, is_unmoved: bool = False) -> int:
        """All of it, for a step that swaps or recomputes, or for one that does neither."""
        return sum(nbytes for _, nbytes in self.parts(is_unmoved=is_unmoved))

    def parts(self, *, is_unmoved: bool = False) -> Iterator[tuple[str, int]]:
        """Its parts by the names that reports give them; they add up."""
        left_bytes = self.before_bytes
        for what, nbytes in (
            ("parameters", self.parameter_bytes - self.uncounted_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer state", self.optimizer_bytes),
        ):
            yield what, min(nbytes, left_bytes)
            left_bytes -= min(nbytes, left_bytes)
        yield "before the step" if left_bytes == self.before_bytes else "else before the step", left_bytes
        pending_bytes = min(self.pending_optimizer_bytes, self.reserve_bytes)
        yield "reserved for optimizer state", pending_bytes
        yield "reserve", self.reserve_bytes - pending_bytes
        yield "margin", self.unmoved_margin_bytes if is_unmoved else self.margin_bytes
