"""Reasons to replan a step, as data, each with the sentence that reports have for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import format_seconds


class Trigger:
    """A reason to replan a step; as text, the sentence of it."""

    recurs: ClassVar[bool] = True  # in the next process too: the plan is cached for it
    may_be_cached: ClassVar[bool] = False  # an earlier process may have replanned for it
    is_timed: ClassVar[bool] = False  # by measured seconds, for which the first rank of a machine plans


@dataclass(frozen=True)
class AccumulatedGradients(Trigger):
    """Gradients are added to those of earlier steps, and memory is short."""

    may_be_cached: ClassVar[bool] = True

    def __str__(self) -> str:
        return "gradients are added to those of the steps before: from now on each is accumulated as it is computed"


@dataclass(frozen=True)
class HeldGrowth(Trigger):
    """Tensors outside of the step hold more than planned."""

    nbytes: int
    recurs: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} more are held between steps than was planned for"


@dataclass(frozen=True)
class InUseGrowth(Trigger):
    """More than before is in use between steps besides tensors."""

    nbytes: int
    recurs: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)} more than before are in use between steps, beside what tensors hold"


@dataclass(frozen=True)
class WarmUpGrowth(Trigger):
    """The first steps have left more in use than planned, or fragmentation has made them exceed the budget."""

    grown_bytes: int
    fragmented_bytes: int

    def __str__(self) -> str:
        if self.fragmented_bytes:
            return f"fragmentation made the step take {format_bytes(self.fragmented_bytes)} too much"
        return f"{format_bytes(self.grown_bytes)} more are in use between steps than was planned for"


@dataclass(frozen=True)
class MisplacedTensor(Trigger):
    """A tensor of one step was still held at offsets of the next."""

    recurs: ClassVar[bool] = False

    def __str__(self) -> str:
        return "a tensor of a step was still held at offsets of the next one"


@dataclass(frozen=True)
class CompressedExcess(Trigger):
    """Swapped tensors take more of the compressed tier than it may occupy."""

    taken_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return f"compressed tensors took {format_bytes(self.taken_bytes)}, more than {format_bytes(self.limit_bytes)}"


@dataclass(frozen=True)
class LossExcess(Trigger):
    """The loss takes more than the plan leaves it."""

    nbytes: int

    def __str__(self) -> str:
        return f"the loss takes {format_bytes(self.nbytes)}, more than the plan leaves it"


@dataclass(frozen=True)
class PredictionOff(Trigger):
    """The measured step differs from its prediction, and most of all its op ``title``."""

    measured_seconds: float
    predicted_seconds: float
    host_seconds: float
    title: str
    op_measured_seconds: float
    op_predicted_seconds: float
    is_timed: ClassVar[bool] = True

    def __str__(self) -> str:
        off = _against(self.measured_seconds, self.predicted_seconds)
        if self.host_seconds > abs(self.op_measured_seconds - self.op_predicted_seconds):
            host = format_seconds(self.host_seconds)
            return f"measured {off} predicted; the device waited for the host, which took {host} to queue its work"
        worst = _against(self.op_measured_seconds, self.op_predicted_seconds)
        return f"measured {off} predicted; most off is op {self.title}: {worst}"


@dataclass(frozen=True)
class UnusedMemory(Trigger):
    """Less is needed outside of an arena than assumed: of the reserve, and for results that the caller may hold."""

    reserve_bytes: int
    results_bytes: int
    may_be_cached: ClassVar[bool] = True
    is_timed: ClassVar[bool] = True

    def __str__(self) -> str:
        reserve, results = format_bytes(self.reserve_bytes), format_bytes(self.results_bytes)
        of_reserve = f"the loss and the optimizer need {reserve} less than was reserved for them"
        of_results = f"gradients of the last step are not held for as long as they might be, which leaves {results}"
        return "; ".join([of_reserve] * (self.reserve_bytes > 0) + [of_results] * (self.results_bytes > 0))


@dataclass(frozen=True)
class UnusedMargin(Trigger):
    """Growth is known, and needs less than the margin."""

    nbytes: int
    may_be_cached: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"the margin can be smaller by {format_bytes(self.nbytes)}, as growth is known now"


def _against(measured_seconds: float, predicted_seconds: float) -> str:
    return f"{format_seconds(measured_seconds)} against {format_seconds(predicted_seconds)}"
