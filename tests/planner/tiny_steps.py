"""Random steps of four to eight ops, with machines and budgets."""

from __future__ import annotations

import random

from hypothesis import assume
from hypothesis import strategies as st

from lmswap.analyze.memory import StepMemory
from lmswap.ir.machine import Host, Link, Machine, Rate, Tier
from lmswap.ir.program import BufferKind
from tests.ir.build import Step, build, unit_machine


@st.composite
def tight_steps(draw):
    """A chain of five ops, some of which read an earlier result too, and a budget that not all of them keep to."""
    lines = ["inference"]
    for op in range(5):
        earlier = (
            ["b0"]
            if op == 4
            else draw(st.lists(st.sampled_from([f"b{n}" for n in range(op - 1)] or ["x"]), max_size=1))
        )
        reads = [f"b{op - 1}" if op else "x", *earlier]
        mark = draw(st.sampled_from(["", "!random"]))
        lines.append(f"f{op} {draw(st.integers(0, 4))}{mark}: {' '.join(reads)} -> b{op}")
    sizes = {f"b{op}": draw(st.integers(1, 4)) for op in range(5)}
    step = build("\n".join(lines), sizes={"x": 0} | sizes)
    memory = StepMemory(step.program, step.costs)
    assume(memory.floor.max() < memory.curve.max())
    return step, draw(st.integers(int(memory.floor.max()), int(memory.curve.max()) - 1))


def tiny_step(seed: int, max_ops: int) -> tuple[Step, Machine, int]:
    """A forward and its backward: skips, ops with two results, in-place writes, gradients; by seed."""
    draw = random.Random(seed)
    num_forward = draw.randint(2, max_ops // 2)
    num_backward = draw.randint(2, max_ops - num_forward)
    lines, kept, gradients, outputs = ["forward"], list[str](), list[str](), list[str]()
    for op in range(num_forward):
        reads = {f"a{op - 1}"} if op else {"x"}
        reads |= {draw.choice(kept)} if kept and draw.random() < 0.4 else set()
        writes = [f"a{op}"]
        if op and draw.random() < 0.15:
            writes = [draw.choice(kept)]
            lines.append(f"f{op} {_seconds(draw)}: {' '.join(sorted(reads))} -> {writes[0]} a{op}")
        else:
            if draw.random() < 0.4:
                writes.append(f"s{op}")
            mark = "!random" if draw.random() < 0.25 else ""
            lines.append(f"f{op} {_seconds(draw)}{mark}: {' '.join(sorted(reads))} -> {' '.join(writes)}")
        kept += [name for name in (f"a{op}", *writes) if name not in kept]
        if draw.random() < 0.15:
            outputs.append(writes[-1])
    lines.append("backward")
    for op in range(num_backward):
        last = f"g{op - 1}" if op else "t"
        reads = {last, draw.choice(kept), *([draw.choice(kept)] if draw.random() < 0.4 else [])}
        writes = [f"g{op}"]
        if draw.random() < 0.4 or op == num_backward - 1:
            writes.append(f"w{op}")
            gradients.append(f"w{op}")
        if op > 1 and draw.random() < 0.2:
            writes.append(f"g{op - 2}")
        mark = "!random" if draw.random() < 0.25 else ""
        lines.append(f"b{op} {_seconds(draw)}{mark}: {' '.join(sorted(reads))} -> {' '.join(writes)}")
        kept.append(f"g{op}")
    names = {name for line in lines if ":" in line for name in line.split(":")[1].replace("->", "").split()}
    sizes = {name: draw.randint(1, 7) for name in sorted(names - {"x"})} | {"x": 0}
    scratch = {line.split()[0]: draw.randint(1, 4) for line in lines if ":" in line and draw.random() < 0.2}
    step = build(
        "\n".join(lines),
        sizes=sizes,
        scratch=scratch,
        outputs=" ".join(outputs),
        tangents="t",
        gradients=" ".join(gradients),
    )
    kind = draw.choice([BufferKind.GRADIENT, BufferKind.ACCUMULATED_GRADIENT])
    step = Step(step.program.with_gradients(kind), step.costs)
    memory = StepMemory(step.program, step.costs)
    low, high = int(memory.floor.max()), int(memory.curve.max())
    return step, _machine(draw), draw.randint(min(low, high - 1), high - 1) if high > low else low


def _seconds(draw: random.Random) -> float:
    return round(draw.uniform(0.2, 4.0), 2)


def _machine(draw: random.Random) -> Machine:
    rates = [Rate.constant(draw.choice([0.7, 1.5, 4.0]), draw.choice([0.0, 0.3])) for _ in range(2)]
    factors = (1.0, 1.0, 1.0) if draw.random() < 0.5 else (0.8, 0.9, 0.7)
    machine = unit_machine()
    link = Link(rates[0], rates[1], *factors)
    host = Host(0.05, 0.1) if draw.random() < 0.2 else None
    return Machine("tiny", 2**30, 1.0, 1.0, 0.0, (Tier("host", machine.tiers[0].capacity_bytes, link),), host)
