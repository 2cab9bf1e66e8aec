"""The whole step of one micro-batch's program: kinds, sums of gradients, and updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.analyze.training_step import CHUNK_BYTES, Optimizer, optimizer_called, training_step
from lmswap.errors import OptionError
from lmswap.ir.program import Buffer, BufferKind, Program
from lmswap.planner import make_plan
from tests.ir.build import Step, build, unit_machine

TEXT = """
    forward
    f 1: x W V -> a
    g 1: a W -> y
    backward
    gw 1: t a -> dW
    gv 1: t x W -> dV
"""


def micro_batch() -> Step:
    step = build(TEXT, outputs="y", tangents="t", gradients="dW dV", sizes={"W": 8, "V": 4, "dW": 8, "dV": 4})
    program = step.program
    values = (replace(v, dtype="bfloat16", shape=(program.buffers[v.buffer].nbytes // 2,)) for v in program.values)
    return replace(step, program=replace(program, values=tuple(values)))


def whole(micro_batches: int = 1, *, clip_norm: bool = False, trained: str = "WV", optimizer: str = "adamw") -> Program:
    step = micro_batch()
    program = replace(step.program, gradients=tuple((step.id(name), step.id(f"d{name}")) for name in trained))
    found = optimizer_called(optimizer)
    return training_step(program, found, micro_batches=micro_batches, clip_norm=clip_norm)


def names(program: Program, phase: str | None = None) -> list[str]:
    ops = [op for s in program.segments if phase in (None, s.phase) for op in program.ops[s.start : s.stop]]
    return [op.name for op in ops]


def test_kinds_hold_what_a_step_of_adamw_keeps() -> None:
    program = whole()
    assert program.bytes_of(BufferKind.WEIGHT) == 12
    assert program.bytes_of(BufferKind.SUMMED_GRADIENT) == 12
    assert program.bytes_of(BufferKind.OPTIMIZER_STATE) == 6 * (8 + 4)  # with a copy in full precision
    assert program.bytes_of(BufferKind.PARAMETER) == 0
    assert program.is_cyclic


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    program = whole(trained="V")
    assert program.bytes_of(BufferKind.WEIGHT) == 12
    assert program.bytes_of(BufferKind.SUMMED_GRADIENT) == 4
    assert {b for op in program.ops for b in op.writes if program.buffers[b].kind is BufferKind.WEIGHT} == {
        program.buffer_names.index("V")
    }


def test_a_forward_alone_reads_weights() -> None:
    step = build("inference\n f 1: x W -> y", outputs="y")
    program = training_step(step.program)
    assert [buffer.kind for buffer in program.buffers if buffer.name == "W"] == [BufferKind.WEIGHT]


def test_gradients_are_summed_over_the_micro_batches() -> None:
    program = whole(3)
    assert names(program).count("sum W.grad") == 2
    sums = [op for op in program.ops if op.target == "aten.add_"]
    assert all(set(op.writes) < set(op.reads) for op in sums)
    assert [s.graph for s in program.segments] == [0, 0, 1, 1, 2, 2]


def test_updates_follow_the_last_use_of_weight_and_gradient_in_the_last_backward() -> None:
    program = whole(2)
    updates = ["adamw of 1 from W.grad", "adamw of 1 from V.grad"]  # gv reads W
    assert names(program)[-5:] == ["sum W.grad", "gv", "sum V.grad", *updates]
    assert program.segments[-1].phase == "backward"


def test_a_weight_that_no_op_reads_is_updated_once_its_gradient_is_final() -> None:
    step = build("forward\n f 1: x -> y\n backward\n g 1: t -> dW\n h 1: t x -> dx", tangents="t", gradients="dW dx")
    program = replace(step.program, buffers=(*step.program.buffers, Buffer(5, 4, BufferKind.PARAMETER, "W")))
    program = replace(program, gradients=((5, step.id("dW")),))
    assert names(training_step(program, optimizer_called("sgd"))) == ["f", "g", "sgd of 1 from W.grad", "h"]


def test_clipping_by_norm_makes_updates_wait_for_all_gradients() -> None:
    program = whole(2, clip_norm=True)
    assert program.segments[-1].phase == "update"
    assert [name.split()[0] for name in names(program, "update")] == ["norm", "norm", "adamw", "adamw"]


def of_layers(*nbytes: int) -> Program:
    """A whole step of layers of ``nbytes`` of parameters each; with gradients and Adam's state it is 4 times that."""
    layers = range(len(nbytes))
    text = ["forward"] + [f"f{n} 1: a{n} W{n} -> a{n + 1}" for n in layers]
    text += ["backward"] + [f"b{n} 1: t{n + 1} W{n} a{n} -> t{n} dW{n}" for n in reversed(layers)]
    sizes = {name: size for n, size in enumerate(nbytes) for name in (f"W{n}", f"dW{n}")}
    gradients = " ".join(f"dW{n}" for n in layers)
    step = build(
        "\n".join(text), sizes=sizes, outputs=f"a{len(nbytes)}", tangents=f"t{len(nbytes)}", gradients=gradients
    )
    pairs = tuple((step.id(f"W{n}"), step.id(f"dW{n}")) for n in layers)
    values = (replace(v, shape=(step.program.buffers[v.buffer].nbytes // 4,)) for v in step.program.values)
    program = replace(step.program, values=tuple(values), gradients=pairs)
    return training_step(program, optimizer_called("adam"), clip_norm=True)


def updated_bytes(program: Program) -> list[int]:
    updates = (op for op in program.ops if op.target == "lmswap.adam")
    return [sum(program.buffers[buffer].nbytes for buffer in op.reads) for op in updates]


def test_small_models_are_updated_in_shares_of_their_state() -> None:
    chunks = updated_bytes(of_layers(*[100] * 96))
    assert chunks == [3 * 400] * 32  # of 96 x 400


def test_large_models_are_updated_in_chunks_of_a_fixed_size() -> None:
    chunks = updated_bytes(of_layers(*[2**25] * 96))
    assert chunks == [CHUNK_BYTES] * 48


def test_parameters_larger_than_a_chunk_are_updated_by_ops_of_their_own() -> None:
    assert sorted(updated_bytes(of_layers(1000, 12, 12, 12, 2000))) == [3 * 48, 4000, 8000]


def test_optimizers_without_state_keep_none() -> None:
    assert whole(optimizer="sgd").bytes_of(BufferKind.OPTIMIZER_STATE) == 6 * 4  # the copy in full precision


@pytest.mark.parametrize("clip_norm", [False, True])
def test_the_whole_step_is_planned_and_verified(clip_norm: bool) -> None:
    program = whole(2, clip_norm=clip_norm)
    machine = unit_machine()
    costs = roofline(program, machine)
    peak_bytes = StepMemory(program, costs).peak.nbytes
    plan = make_plan("auto", program, costs, machine, budget_bytes=peak_bytes - 8, tier="host", min_swap_bytes=1)
    assert plan.predicted_peak_bytes <= peak_bytes - 8
    assert plan.swaps


def test_errors_name_what_is_missing() -> None:
    step = micro_batch()
    with pytest.raises(OptionError, match="micro_batches must be at least 1, not 0"):
        training_step(step.program, micro_batches=0)
    with pytest.raises(OptionError, match="1 parameters are trained, and there is no optimizer"):
        training_step(replace(step.program, gradients=((step.id("W"), step.id("dW")),)))
    with pytest.raises(OptionError, match="unknown optimizer 'adamm'; known are sgd"):
        optimizer_called("adamm")
    assert isinstance(optimizer_called("adam"), Optimizer)
