"""Plans of earlier processes, cached in one file per step, machine and options."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lmswap.errors import LmswapError, PlanInfeasible
from lmswap.hardware.cache import CacheFile
from lmswap.ir.backward_parts import streamed_gradient_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.json_io import as_json, from_fields
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import LOSS, Program
from lmswap.planner import check

_log = logging.getLogger(__name__)

# A plan for a budget that differs by no more than this share is reused.
_BUDGET_TOLERANCE = 0.01
# Raised by files whose fields have other types, or whose numbers are out of range.
DAMAGE = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)


class PlannedMemory(NamedTuple):
    """The device memory that a plan was made for."""

    step_bytes: int  # that its step might occupy: the plan's budget, fragmentation and results
    # The parts that would be reserved, or left free, if observed steps had not shown them to be unused.
    spared_reserve_bytes: int = 0
    spared_margin_bytes: int = 0
    # What streams in memory that its tensors leave: the update after its last op, and gradients in its backwards.
    update_bytes: int = 0
    streams_gradients: bool = False
    earlier_output_bytes: int = 0  # of the step before, held until the forward has returned its own

    @property
    def is_spared(self) -> bool:
        """Whether the plan is for steps that have run, as it has more memory than those of a new process."""
        return self.spared_reserve_bytes + self.spared_margin_bytes > 0

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> PlannedMemory:
        """Reads its fields; older plan files have one number for both spared parts, which counts as reserve."""
        spared_bytes = data["spared_bytes" if "spared_bytes" in data else "spared_reserve_bytes"]
        return PlannedMemory(
            int(data["step_bytes"]),
            int(spared_bytes),
            int(data.get("spared_margin_bytes", 0)),
            int(data.get("update_bytes", 0)),
            bool(data.get("streams_gradients", False)),
            int(data.get("earlier_output_bytes", 0)),
        )

    def with_streams(self, program: Program, costs: OpCosts) -> OpCosts:
        """``costs`` of a step of ``program`` that leaves room for what streams or is held; plans are made by them."""
        costs = self.with_held(program, costs)
        last = len(costs.scratch_bytes) - 1
        takes_more = self.update_bytes > costs.scratch_bytes[last]
        return costs.with_scratch({last: self.update_bytes}) if takes_more else costs

    def naming_update(self, refusal: PlanInfeasible, program: Program) -> PlanInfeasible:
        """``refusal`` by costs of `with_streams` of ``program``; it names the update if most is needed there."""
        scratch = f"scratch of {program.ops[-1].name}", self.update_bytes
        if not self.update_bytes or scratch not in refusal.live:
            return refusal
        update = "temporary values of the optimizer", self.update_bytes
        live = tuple(update if each == scratch else each for each in refusal.live)
        return refusal.but(where="the update of parameters", live=live, update_bytes=self.update_bytes)

    def with_held(self, program: Program, costs: OpCosts) -> OpCosts:
        """``costs`` of a step of ``program`` of whose memory streamed gradients and earlier outputs take their part."""
        held = Counter(streamed_gradient_bytes(program) if self.streams_gradients else {})
        if self.earlier_output_bytes:
            forwards = (program.ops[each.start : each.stop] for each in program.segments if each.phase == "forward")
            within = (op.index for ops in forwards for op in ops if op.target != LOSS)
            held.update(dict.fromkeys(within, self.earlier_output_bytes))
        return costs.with_scratch({op: costs.scratch_bytes[op] + nbytes for op, nbytes in held.items()})


@dataclass(frozen=True)
class CachedPlan:
    """A plan with its inputs: the costs measured on ``machine`` at that time, without what ``room`` holds beside."""

    plan: Plan
    costs: OpCosts
    machine: Machine
    room: PlannedMemory

    def fits(self, budget_bytes: int, slack_bytes: int) -> bool:
        """Whether the plan meets ``budget_bytes`` and uses them, within ``slack_bytes``, by which starts differ."""
        tolerated_bytes = max(slack_bytes, _BUDGET_TOLERANCE * budget_bytes)
        is_near = abs(self.room.step_bytes - budget_bytes) <= tolerated_bytes
        return self.plan.predicted_peak_bytes <= budget_bytes + slack_bytes and (not self.plan.moves or is_near)

    def check(self, program: Program, *, tier: str, min_swap_bytes: int) -> None:
        """Checks the plan and its certificate by independent code, see `lmswap.planner.check`.

        Raises:
            PlanInvalid: it is no plan of ``program`` by these inputs.
        """
        costs = self.room.with_streams(program, self.costs)
        check(self.plan, program, costs, self.machine, tier=tier, min_swap_bytes=min_swap_bytes)

    def to_data(self) -> dict[str, Any]:
        """The plan and its origin as `as_json` writes them; `from_data` reads them back equal once they are parsed."""
        return {
            "plan": self.plan.to_data(),
            "costs": self.costs,
            "machine": json.loads(self.machine.to_json()),
            "room": self.room._asdict(),
        }

    @staticmethod
    def from_data(data: Mapping[str, Any], num_ops: int) -> CachedPlan:
        """Reads what `to_data` gave for a program of ``num_ops``.

        Raises:
            LmswapError, or one of `DAMAGE`: the data are damaged.
        """
        plan, machine = Plan.from_data(data["plan"]), Machine.from_json(json.dumps(data["machine"]))
        return CachedPlan(plan, _costs(data["costs"], num_ops), machine, PlannedMemory.from_data(data["room"]))


class PlanCache:
    """The cached plans for one measured machine, one set of options and one set of software versions."""

    def __init__(self, machine: Machine, kind: Mapping[str, Any], *, tier: str, min_swap_bytes: int) -> None:
        """``kind`` holds everything else that plans depend on, as JSON types."""
        self._machine, self._tier, self._min_swap_bytes = machine, tier, min_swap_bytes
        limits = {"tier": tier, "min_swap_bytes": min_swap_bytes}
        self._kind = {
            **kind,
            **limits,
            "machine": machine.name,
            "link": _digest(_without_capacity(machine).to_json()),
        }

    def read(self, program: Program, *, spares: bool = False) -> CachedPlan | None:
        """The plan last written for ``program``, verified; None if there is no valid one.

        With ``spares`` it is the plan for steps that have shown part of the reserve to be unused.
        """
        file = self._file(program, spares)
        return self._verified(program, file.read, f"the cached plan {file.path}")

    def write(self, program: Program, planned: CachedPlan) -> None:
        """Replaces the cached plan of ``program`` with the same ``spares`` by ``planned``."""
        self._file(program, planned.room.is_spared).write(planned.to_data())

    def name(self, program: Program) -> str:
        """Key shared by all interchangeable plans of ``program``."""
        return f"plan-{_digest(json.dumps(self._key(program), sort_keys=True))}"

    def pack(self, planned: CachedPlan) -> bytes:
        """``planned`` for another process."""
        return gzip.compress(as_json(planned.to_data()).encode())

    def unpack(self, program: Program, packed: bytes) -> CachedPlan | None:
        """The plan that another process packed for ``program``, verified; None if it is not valid here."""
        return self._verified(program, lambda: json.loads(gzip.decompress(packed)), "another rank's plan")

    def _verified(self, program: Program, read: Callable[[], Mapping[str, Any] | None], what: str) -> CachedPlan | None:
        """The plan in the data of ``read``, verified for ``program``; None if there is no valid one."""
        try:
            if (data := read()) is None:
                return None
            planned = self._with_current_capacity(CachedPlan.from_data(data, len(program.ops)))
            limits: dict[str, Any] = {"tier": self._tier, "min_swap_bytes": self._min_swap_bytes}
            planned.check(program, **limits)
        except (OSError, LmswapError, *DAMAGE) as error:
            _log.warning("%s cannot be used, planning again: %s", what, error)
            return None
        return planned

    def _key(self, program: Program) -> dict[str, Any]:
        return {**self._kind, "program": program.digest}

    def _file(self, program: Program, spares: bool) -> CacheFile:
        return CacheFile.locate("plan", {**self._key(program), "spares": spares})

    def _with_current_capacity(self, planned: CachedPlan) -> CachedPlan:
        """``planned`` on its machine with the current capacity."""
        capacity_bytes = self._machine.tier(self._tier).capacity_bytes
        tiers = tuple(replace(tier, capacity_bytes=capacity_bytes) for tier in planned.machine.tiers)
        return replace(planned, machine=replace(planned.machine, tiers=tiers))


def _costs(data: Mapping[str, Any], num_ops: int) -> OpCosts:
    costs = from_fields(OpCosts, data)
    lengths = len(costs.seconds), len(costs.scratch_bytes), len(costs.pieces)
    if lengths[:2] != (num_ops, num_ops) or lengths[2] not in (0, num_ops):
        raise ValueError("costs of {}, {} and {} ops; there are {}".format(*lengths, num_ops))
    return costs


def _without_capacity(machine: Machine) -> Machine:
    return replace(machine, tiers=tuple(replace(tier, capacity_bytes=0) for tier in machine.tiers))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
