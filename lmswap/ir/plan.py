"""Plans: the action for each buffer, with positions and offsets. The planner's output, the rewriter's input."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.certificate import Certificate
from lmswap.ir.json_io import as_json, build_record, fields_of, from_fields, read_record
from lmswap.terminal import escape_controls

SCHEMA = "lmswap.plan/1"


class Decision(StrEnum):
    """The action for a buffer in a gap between two uses."""

    KEEP = "keep"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Op ``op`` of the program runs once more, just before the op that the program has at ``position``.

    It writes new buffers in place of all that the op writes, and later ops read the new ones. The lifetime of the old
    buffer ends at its last use before ``position``: dropping and recomputing a buffer is one decision.
    """

    op: int
    position: int


class SwapAction(IntEnum):
    """What happens to a swap at one of its positions, in the order of actions at one position."""

    OUT_START = 0
    RELEASE = 1
    IN_START = 2
    FIRST_USE = 3


@dataclass(frozen=True, slots=True)
class Swap:
    """One trip of a buffer to a tier and back, in the gap between two of its uses.

    Ops and buffers are those of the plan's schedule (`lmswap.ir.schedule`), in which recomputes are ordinary ops.
    All four times are positions (just before that op)::

        last use before        next use
           |                      |
        op op op op op op op op op op        compute
             ^out_start  ^release ^first_use
             [== copy out ==]  [== in ==]
                                ^in_start
        memory held #########.......#########

    ``out_start`` the copy out is queued (None: an earlier swap of this buffer left a valid host copy);
    ``release`` compute waits for that copy, the device memory is free from here on (it may equal ``out_start``); a
    copy out that a forward has queued may be waited for in its backward, if this follows at once;
    ``in_start`` device memory is taken and the copy in is queued; ``first_use`` compute waits for it.
    The tier's bytes [offset, offset + nbytes) are held from the first out_start to the last first_use.
    At one position, all out_starts come first, then the releases, the in_starts, and the first_uses.

    A persistent buffer may be swapped over the step's end, in the gap from its last use to its first use in the next
    step: positions from the number of ops on are those of the next step. No copy is under way at the step's end: the
    buffer is then resident (``out_start``, or ``release`` without one, is in the next step), or it has been released.
    A host copy of a persistent buffer has its place in the tier in all steps.
    """

    buffer: int
    tier: str
    offset: int
    out_start: int | None
    release: int
    in_start: int
    first_use: int

    def crosses_end(self, num_ops: int) -> bool:
        """Whether the buffer is non-resident at the end of a step of ``num_ops`` ops, and so at its start."""
        return self.release <= num_ops <= self.in_start

    def fetch(self, num_ops: int) -> tuple[int, int]:
        """``in_start`` and ``first_use`` as positions of the step of ``num_ops`` ops in which they are."""
        start = self.in_start // num_ops * num_ops
        return self.in_start - start, self.first_use - start

    def absences(self, num_ops: int) -> Iterator[tuple[int, int]]:
        """Yield the positions [start, stop) of a step of ``num_ops`` ops in which the buffer is non-resident."""
        if self.crosses_end(num_ops):
            yield 0, self.in_start - num_ops
            yield self.release, num_ops
        else:
            step_start = self.release // num_ops * num_ops
            yield self.release - step_start, self.in_start - step_start

    def actions(self, num_ops: int) -> Iterator[tuple[int, SwapAction]]:
        """Yield the position of each action in a step of ``num_ops`` ops: those of the next step count from its start.

        What is released at the step's end has the position ``num_ops``.
        """
        leaves_here = self.release <= num_ops
        if self.out_start is not None:
            yield self.out_start if leaves_here else self.out_start - num_ops, SwapAction.OUT_START
        yield self.release if leaves_here else self.release - num_ops, SwapAction.RELEASE
        returns_here = self.in_start < num_ops
        yield self.in_start if returns_here else self.in_start - num_ops, SwapAction.IN_START
        yield self.first_use if returns_here else self.first_use - num_ops, SwapAction.FIRST_USE


@dataclass(frozen=True, repr=False)
class Plan:
    """Recomputes in order of execution, swaps in order of need (``first_use``), and their predicted cost.

    Copies at different positions are queued by position, copies at the same one in the order of ``swaps``.

    ``budget_bytes`` and ``predicted_peak_bytes`` count what the step itself allocates: see `lmswap.analyze.memory`.
    ``certificate`` bounds the seconds of any plan within that budget; None where none was computed.
    """

    policy: str
    budget_bytes: int
    swaps: tuple[Swap, ...]
    predicted_seconds: float
    predicted_peak_bytes: int
    tier_bytes: dict[str, int] = field(default_factory=dict)  # capacity each tier must offer
    reasons: dict[int, str] = field(default_factory=dict)  # buffer id of the program -> reason, as text
    recomputes: tuple[Recompute, ...] = ()
    certificate: Certificate | None = None
    is_optimal: bool = False  # an exhaustive search has found that no plan takes less

    @property
    def excess(self) -> float | None:
        """Upper bound on the gap to the optimum: predicted seconds over those of the bound, less 1; 0.03 is 3 %."""
        if self.is_optimal:
            return 0.0
        bound_seconds = self.certificate.seconds if self.certificate else 0.0
        return self.predicted_seconds / bound_seconds - 1 if bound_seconds else None

    @property
    def moves(self) -> bool:
        """Whether it swaps or recomputes anything."""
        return bool(self.swaps or self.recomputes)

    @property
    def reruns(self) -> tuple[Recompute, ...]:
        """The former name of ``recomputes``, to be removed after one release."""
        _warn_of_former_name("Plan.reruns", "Plan.recomputes")
        return self.recomputes

    def acts_as(self, other: Plan) -> bool:
        """Whether both have the same swaps and recomputes."""
        return (self.swaps, self.recomputes) == (other.swaps, other.recomputes)

    def __repr__(self) -> str:
        return f"<{self._heading()}; print it, or see its fields>"

    def __str__(self) -> str:
        lines = [self._heading()]
        for swap in self.swaps:
            out = "copied before" if swap.out_start is None else f"out from {swap.out_start}"
            back = f"in from {swap.in_start} to {swap.first_use}"
            lines.append(f"  buffer {swap.buffer} to {swap.tier}: {out}, released at {swap.release}, {back}")
        lines += [f"  op {recompute.op} recomputed before op {recompute.position}" for recompute in self.recomputes]
        return escape_controls("\n".join(lines))

    def _heading(self) -> str:
        moved = f"swaps: {len(self.swaps)}, recomputes: {len(self.recomputes)}"
        memory = (
            f"{format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)} for the step's tensors"
        )
        return escape_controls(f"plan by policy '{self.policy}' ({moved}, {memory}, {self.predicted_seconds:.4g} s)")

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back equal."""
        return as_json(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """The plan as `as_json` writes it; `from_data` reads it back equal once it is parsed."""
        record = {"reruns" if name == "recomputes" else name: value for name, value in fields_of(self).items()}
        return {"schema": SCHEMA, **record}

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote; `lmswap.planner.verify` checks the plan itself.

        Raises:
            OptionError: not JSON, of another schema, or damaged.
        """
        return read_record(text, SCHEMA, _plan, "plan file")

    @staticmethod
    def from_data(data: Any) -> Plan:
        """As `from_json`, of parsed JSON."""
        return build_record(data, SCHEMA, _plan, "plan file")


def _plan(data: Mapping[str, Any]) -> Plan:
    return from_fields(Plan, {**data, "recomputes": data["reruns"]})


def __getattr__(name: str) -> Any:
    if name == "Rerun":
        _warn_of_former_name("lmswap.ir.plan.Rerun", "lmswap.ir.plan.Recompute")
        return Recompute
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _warn_of_former_name(former: str, name: str) -> None:
    warnings.warn(f"{former} is now {name}; its former name will be removed", DeprecationWarning, stacklevel=3)
