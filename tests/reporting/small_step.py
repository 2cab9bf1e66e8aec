"""A step of six ops, small enough to check every figure by hand: two convolutions and a loss, and their backward.

buffer       made at op   used at ops      bytes
1 conv       0            1, 4             3 MiB     swapped in the gap after op 1
2 relu       1            2, 3             2 MiB
3 loss       2                             4 B       output
4 grad_loss                 3              4 B       tangent
5 grad_relu  3            4                2 MiB
6 grad_x     4                             1 MiB     gradient
"""

from lmswap.ir.certificate import Certificate
from lmswap.ir.machine import Link, Machine, Rate, Tier
from lmswap.ir.plan import Plan, Swap
from lmswap.ir.program import Buffer, BufferKind, Op, Program, Segment, Value
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting import Report, make_report
from lmswap.reporting.step import StepFigures

MIB = 2**20
BUDGET_BYTES, BASE_BYTES, RESERVE_BYTES, MARGIN_BYTES = 12 * MIB, 2 * MIB, MIB, MIB

LINK = Link(Rate.constant(2**30), Rate.constant(2**29), both_factor=0.5, busy_factor=0.75)
MACHINE = Machine("unit", 2**30, 1e9, 1e9, 1e-6, (Tier("disk", 2**30, LINK),))

PROGRAM = Program(
    name="Small",
    ops=(
        Op(0, "conv", "aten.convolution.default", "small.py:8 x = self.conv(x)", (0,), (1,)),
        Op(1, "relu", "aten.relu.default", "small.py:9 x = x.relu()", (1,), (2,)),
        Op(2, "loss", "aten.sum.default", "", (2,), (3,)),
        Op(3, "grad_relu", "aten.expand.default", "", (2, 4), (5,)),
        Op(4, "grad_x", "aten.convolution_backward.default", "small.py:8 x = self.conv(x)", (1, 5), (6,)),
    ),
    buffers=(
        Buffer(0, 9 * MIB, BufferKind.PARAMETER),
        Buffer(1, 3 * MIB, BufferKind.ACTIVATION),
        Buffer(2, 2 * MIB, BufferKind.ACTIVATION),
        Buffer(3, 4, BufferKind.OUTPUT),
        Buffer(4, 4, BufferKind.TANGENT),
        Buffer(5, 2 * MIB, BufferKind.ACTIVATION),
        Buffer(6, MIB, BufferKind.GRADIENT),
    ),
    values=tuple(
        Value(index, name, index, "float32", (1,), (1,), 0)
        for index, name in enumerate(["weight", "conv", "relu", "loss", "grad_loss", "grad_relu", "grad_x"])
    ),
    segments=(Segment(0, "forward", 0, 3), Segment(0, "backward", 3, 5)),
)

PLAN = Plan(
    policy="swap_all",
    budget_bytes=8 * MIB,
    swaps=(Swap(buffer=1, tier="disk", offset=0, out_start=2, release=3, in_start=3, first_use=4),),
    predicted_seconds=5.5,
    predicted_peak_bytes=7 * MIB,
    tier_bytes={"disk": 3 * MIB},
    certificate=Certificate(5.0),
    reasons={1: "swap: idle for 2 ops", 2: "keep: never idle between its uses", 6: "keep: a gradient"},
)


def timeline(source: str, *, base_bytes: int = 0, stall_seconds: float = 0.5) -> Timeline:
    """Ops of one second each, a stall before the last, one copy out and one in."""
    spans = [Span(Lane.COMPUTE, op.name, op.index, op.index + 1) for op in PROGRAM.ops[:4]]
    spans.append(Span(Lane.STALL, "wait for conv", 4, 4 + stall_seconds, buffer=1))
    spans.append(Span(Lane.COMPUTE, "grad_x", 4 + stall_seconds, 5 + stall_seconds))
    spans.append(Span(Lane.OUT, "conv", 2, 2.75, 3 * MIB, 1))
    spans.append(Span(Lane.IN, "conv", 3, 4 + stall_seconds, 3 * MIB, 1))
    held = [(0, 3), (1, 5), (3, 4), (3, 7), (5 + stall_seconds, 1)]
    return Timeline(source, tuple(spans), tuple((seconds, base_bytes + mib * MIB) for seconds, mib in held))


def report(**changes: object) -> Report:
    """After three steps whose measured peak was 9 MiB and whose stall was 1 s."""
    arguments: dict[str, object] = {
        "model": "Small",
        "device": "cpu (unit machine)",
        "policy": "swap_all",
        "plan_origin": "made in 20 ms",
        "tier": "disk",
        "budget_bytes": BUDGET_BYTES,
        "counted": "growth of resident memory since enable",
        "base_bytes": BASE_BYTES,
        "reserve_bytes": RESERVE_BYTES,
        "margin_bytes": MARGIN_BYTES,
        "budget_parts": (("before the step", BASE_BYTES), ("reserve", RESERVE_BYTES), ("margin", MARGIN_BYTES)),
        "program": PROGRAM,
        "plan": PLAN,
        "predicted": timeline("predicted"),
        "free_seconds": 5.0,
        "steps": 3,
        "step": 3,
        "trains": True,
        "measured": timeline("measured", base_bytes=2 * MIB, stall_seconds=1),
        "measured_peak_bytes": 9 * MIB,
        "measured_tensor_peak_bytes": 7 * MIB,
        "highest_peak_bytes": 9 * MIB,
        "highest_peak_step": 3,
        "tier_used_bytes": 0,
        "tier_peak_bytes": 3 * MIB,
        "tier_highest_bytes": 3 * MIB,
    }
    arguments |= changes
    separate = ("program", "plan", "placed_bytes", "unplanned_step_bytes")
    planned = {name: arguments.pop(name) for name in separate if name in arguments}
    for name in {"notes", "plan_notes"} & arguments.keys():
        arguments[name] = tuple(arguments[name])
    return make_report(StepFigures(**arguments), **planned)


def planned_report(**changes: object) -> Report:
    """As `report`, before the first step has finished."""
    fields = ("step", "measured", "measured_peak_bytes", "measured_tensor_peak_bytes", "highest_peak_bytes")
    nothing = {**dict.fromkeys(fields), "steps": 0, "trains": False, "tier_peak_bytes": 0, "tier_highest_bytes": 0}
    return report(**{**nothing, **changes})
