"""All exceptions and warnings of lmswap; each keeps its numbers as fields and composes its message."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lmswap.terminal import escape_controls


def without_path(error: Exception) -> str:
    """Return the message of ``error`` without the path that system errors append, for a sentence that names it."""
    return str(getattr(error, "strerror", None) or error)


class LmswapError(Exception):
    """Base of all errors that lmswap raises on purpose; control characters in names from files are escaped."""

    def __str__(self) -> str:
        return escape_controls(super().__str__())

    @property
    def summary(self) -> str:
        """The message as a sentence, without a full stop, for notes and logs."""
        return str(self)


class BudgetExceeded(UserWarning):
    """A step held more than the budget; training goes on."""


class NotManaged(UserWarning):
    """An enabled model ran, or was trained, in a way that lmswap cannot manage: it took the memory of plain torch."""


class ManyTraces(UserWarning):
    """An enabled model is traced for one input shape, or one number, after the other; training goes on."""


class UntestedTorch(UserWarning):
    """lmswap is not tested with this version of torch."""


class OptionError(LmswapError, ValueError):
    """An argument of a public function is unknown or cannot be used; nothing was started."""


def not_enabled(model: object) -> OptionError:
    """Return the error of a function that takes an enabled ``model``."""
    return OptionError(f"{type(model).__name__} is not enabled: call lmswap.enable(model, budget=...) first")


class CaptureError(LmswapError):
    """The model's step could not be turned into a Program; the message names the op or the reason."""


class PlanInvalid(LmswapError):
    """A plan breaks a rule of the verifier: a bug in a planner, never in the user's model."""

    def __init__(self, rule: str, detail: str, *, buffer: int | None = None, op: int | None = None) -> None:
        self.rule, self.detail, self.buffer, self.op = rule, detail, buffer, op
        where = "".join(f", {label} {index}" for label, index in (("buffer", buffer), ("op", op)) if index is not None)
        super().__init__(f"plan breaks the rule '{rule}'{where}: {detail}")


@dataclass(kw_only=True, eq=False, repr=False)
class PlanInfeasible(LmswapError):
    """No plan of the policy fits the budget; states what is needed, in parts that add up, where, and what would fit.

    The message has lines of at most 80 characters, the last are advice; ``summary`` is its first sentence.
    """

    budget_bytes: int
    needed_bytes: int
    where: str
    live: tuple[tuple[str, int], ...] = ()
    policy: str = ""
    parts: tuple[tuple[str, int], ...] = ()  # of what is needed, named as in reports, the last: the step's own tensors
    unit: tuple[str, int] = ("MiB", 2**20)  # that the budget was given in
    shares: tuple[float, float] | None = None  # the given and the needed per cent, if it was a share
    instead: str = ""  # an alternative, in words
    counted: str = ""  # by the budget
    uncounted_bytes: int = 0  # of parameters that it does not count
    gradient_bytes: int = 0  # of the step's own tensors, at most
    state_bytes: int = 0  # of those of a whole step: parameters, gradients and optimizer state
    update_bytes: int = 0  # of those of the update of parameters, if most is needed there
    note: str = ""  # a remark on the step, in words
    assumes_optimizer: bool = False  # the reserve for optimizer state is Adam's, as there is no optimizer yet

    def __post_init__(self) -> None:
        unit_name, scale = self.unit
        digits = 1 if scale <= 2**20 else 3

        def written(nbytes: float) -> str:
            return f"{nbytes / scale:.{digits}f} {unit_name}"

        # Rounded up: the budget in the message has to suffice.
        needed = written(math.ceil(self.needed_bytes / scale * 10**digits) * scale / 10**digits)
        given, least, about = written(self.budget_bytes), needed, [self.counted] if self.counted else []
        if self.shares is not None:
            given, about = f"{self.shares[0]:g}%", [given, *about]
            least = f"{math.ceil(10 * self.shares[1]) / 10:g}% ({needed})"
        of = f" ({', '.join(about)})" if about else ""
        self._summary = f"policy '{self.policy}' cannot fit this step into {given}{of}: it needs at least {least}"
        nothing = written(0)
        gradients, uncounted = written(self.gradient_bytes), written(self.uncounted_bytes)
        among = f" (gradients among them: up to {gradients})" if gradients != nothing else ""
        if self.state_bytes:
            among = f" (parameters, gradients and optimizer state among them: {written(self.state_bytes)})"
        lines = [f"{self._summary}{f', at {self.where}' * (not self.live)}"]
        lines += _items([(text, what) for what, n in self.parts if (text := written(n)) != nothing])
        lines[-1] += among * bool(self.parts)
        if self.assumes_optimizer:
            lines.append("No optimizer exists yet, and Adam's state is reserved: create yours before the first call.")
        if uncounted != nothing:
            lines.append(f"The parameters, {uncounted}, existed before and do not count.")
        if self.live:
            lines.append(f"The most is needed at {self.where}, by")
            lines += _items([(written(nbytes), name) for name, nbytes in self.live[:4]])
        if self.note:
            lines.append(f"The step was {self.note}.")
        advice = [f"Give a budget of at least {least}", *([self.instead] if self.instead else ())]
        lines.append(f"{', '.join(advice)}{self._batch(written)}.")
        super().__init__(_wrapped(lines, f"{type(self).__module__}.{type(self).__name__}: "))

    @property
    def summary(self) -> str:
        """See `LmswapError`: what was given, and what is needed."""
        return escape_controls(self._summary)

    def _batch(self, written: Callable[[float], str]) -> str:
        """Return how much smaller a batch would have to be, if its activations are in proportion to it."""
        if not self.parts:
            return ", or a smaller batch or image"
        *others, (_, step_bytes) = self.parts
        other_bytes = min(self.gradient_bytes + self.state_bytes + self.update_bytes, step_bytes)
        left_bytes = self.budget_bytes - sum(nbytes for _, nbytes in others) - other_bytes
        percent = 100 * left_bytes // max(1, step_bytes - other_bytes)
        if percent > 0:
            return f", or a smaller batch or image, of about {percent} % of this one"
        least = written(sum(nbytes for _, nbytes in others) + other_bytes)
        return f"; a smaller batch or image cannot suffice: {least} are needed even without activations"

    def but(self, **changes: Any) -> PlanInfeasible:
        """Return the same refusal with ``changes`` of its fields."""
        return replace(self, **changes)


def _items(items: list[tuple[str, str]]) -> list[str]:
    """Return a line for each byte count and name, the counts below each other."""
    width = max((len(text) for text, _ in items), default=0)
    return [f"    {text:>{width}}  {name}" for text, name in items]


def _wrapped(lines: list[str], prefix: str) -> str:
    """Return ``lines`` in a terminal's width of 80; ``prefix`` is what a traceback writes before them."""
    lines = [prefix + lines[0], *lines[1:]]
    wrapper = textwrap.TextWrapper(80, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, lines)).removeprefix(prefix)


class PlanMismatch(LmswapError):
    """A plan file was written for another model, or breaks a rule: it is not followed."""


class RankMissing(LmswapError, TimeoutError):
    """Another process of this machine that plans together with this one did not arrive, or did not go on, in time."""

    def __init__(self, *, rank: int, awaited: int | str, what: str, seconds: float) -> None:
        self.rank, self.awaited, self.what, self.seconds = rank, awaited, what, seconds
        other = f"rank {awaited}" if isinstance(awaited, int) else "another rank"
        super().__init__(
            f"rank {rank} of this machine has waited {seconds:g} s for {other} to measure and plan together "
            f"('{what}'): either it has ended, or it has not enabled a model here. Enable one in all of them, in the "
            "same order, or each by itself with together=False"
        )


class TierError(LmswapError):
    """Host memory or disk cannot hold swapped tensors: missing, full, unwritable, or memory that poses as a disk."""


class DriverError(LmswapError):
    """A call of the device driver failed; the message names the call and quotes the driver."""


class TransferError(LmswapError):
    """A transfer failed in the middle of a step; the step is lost, the process can go on."""


class BytesDiffer(TransferError):
    """The engine's error for a copy in that returned other bytes; it knows no names, see `BytesChanged`."""

    def __init__(self, text: str, swap: int, nbytes: int, offset_bytes: int) -> None:
        self.swap, self.nbytes, self.offset_bytes = swap, nbytes, offset_bytes
        super().__init__(text)


class ForkedProcess(LmswapError):
    """A model was used in a child process forked after it was enabled: its engine stayed with the parent."""

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(
            f"this process was forked from one in which {model} was enabled, and what moves its tensors stayed there: "
            "call lmswap.enable(model, budget=...) in the child, or lmswap.disable(model) to run it plainly"
        )


class DoubleBackward(LmswapError, RuntimeError):
    """A gradient of captured graphs was differentiated once more, which graphs of torch.compile do not support."""


class SavedTensorChanged(LmswapError, RuntimeError):
    """A tensor that the backward pass needs was changed in place after it was saved: a bug in the model."""


class VerificationError(LmswapError):
    """Verification found a step that swapping changed: do not use its gradients."""


class BytesChanged(VerificationError):
    """A tier returned other bytes than were swapped out; states on which part of the way they changed."""

    def __init__(self, buffer: str, made_by: str, nbytes: int, where: str, offset_bytes: int) -> None:
        self.buffer, self.made_by, self.nbytes = buffer, made_by, nbytes
        self.where, self.offset_bytes = where, offset_bytes
        super().__init__(
            f"the {nbytes / 2**20:.1f} MiB of buffer '{buffer}', made by {made_by}, were changed {where}, first within "
            f"the MiB at byte {offset_bytes}: memory, disk or lmswap is at fault; the step is lost, do not use its "
            "gradients"
        )


# Seen: conv3d of bfloat16 [1, 1, 4, 8, 8] by [16, 1, 5, 5, 5], padding 2, gives NaN in plain torch 2.13.
_NAN = (
    ". One of them is NaN: some operators return NaN when the memory allocated for them holds NaN, and "
    "then these are not lmswap's bytes (seen: oneDNN's gradients of bfloat16 weights; "
    "torch.backends.mkldnn.flags(enabled=False) goes without it)"
)


class ResultDiffers(VerificationError):
    """A step with swaps gave another result than the same step without them."""

    def __init__(
        self,
        step: int,
        result: str,
        made_by: str,
        *,
        num_differing: int,
        num_elements: int,
        first: str,
        is_nan: bool = False,
        moved: tuple[str, ...] = (),
    ) -> None:
        self.step, self.result, self.made_by, self.moved = step, result, made_by, moved
        self.num_differing, self.num_elements, self.first = num_differing, num_elements, first
        super().__init__(
            f"step {step}: {result}, made by {made_by}, is another one with swaps than without: {num_differing} of "
            f"{num_elements} elements differ, {first}"
            + (f"; swapped or recomputed on the way to it: {', '.join(moved)}" if moved else "")
            + ". The step is lost, do not use its gradients"
            + (_NAN if is_nan else "")
        )


class PlainTorchDiffers(VerificationError):
    """A step through captured graphs gave another result than the model's own code gives."""

    def __init__(
        self, step: int, result: str, *, num_differing: int, num_elements: int, first: str, is_nan: bool = False
    ) -> None:
        self.step, self.result = step, result
        self.num_differing, self.num_elements = num_differing, num_elements
        super().__init__(
            f"step {step}: {result} is another one than plain torch gives: {num_differing} of {num_elements} elements "
            f"differ, {first} lmswap. Swapping is not the cause: the graphs that torch captured compute another result "
            'than the model\'s own code; compiler="eager" goes without them. Please report it'
            + (_NAN if is_nan else "")
        )


class TraceError(LmswapError):
    """A profiler's file cannot be read, or lacks data that the figures need; the message names the file."""


class WindowError(LmswapError):
    """Not all steps to be profiled ran; the message states how many did."""
