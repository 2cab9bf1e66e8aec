"""Schedules of other tools: seconds and peaks by hand, and lmswap's verifier on every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.whole_step.models import variants
from benchmarks.whole_step.peers import PEERS, PeerPlan, Setup, best_plan
from lmswap import dry_run
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.analyze.training_step import training_step
from lmswap.ir.program import BufferKind, Program
from lmswap.planner import simulate, verify
from tests.benchmarks.whole_step.small_steps import ADAMW, HOST_BYTES_PER_SECOND, MACHINE, training
from tests.ir.build import build

SETUP = Setup(ADAMW, MACHINE, HOST_BYTES_PER_SECOND, min_swap_bytes=1)


def plan_of(name: str, step: Program, budget_bytes: int) -> PeerPlan | None:
    return best_plan(PEERS[name], [step], SETUP, budget_bytes)


def checked(found: PeerPlan | None) -> PeerPlan:
    assert found is not None
    verify(found.program, found.costs, found.machine, found.plan)
    timeline = simulate(found.program, found.costs, found.machine, found.plan)
    assert (timeline.seconds, timeline.peak_bytes) == (found.plan.predicted_seconds, found.plan.predicted_peak_bytes)
    return found


def inference() -> Program:
    """Four layers of 2 bytes in a cycle of 4 s."""
    step = build(
        "inference\na 1: x layers.0.W -> p\nb 1: p layers.1.W -> q\nc 1: q layers.2.W -> r\nd 1: r layers.3.W -> s",
        weights="layers.0.W layers.1.W layers.2.W layers.3.W",
        sizes={f"layers.{number}.W": 2 for number in range(4)},
    )
    names = step.program.buffer_names
    return replace(step.program, buffers=tuple(replace(b, name=names[b.id]) for b in step.program.buffers))


@pytest.mark.parametrize(("budget_bytes", "swapped", "seconds"), [(10, 0, 4), (8, 3, 7), (6, 4, 9)])
def test_block_swap_streams_the_fewest_layers_that_fit(budget_bytes: int, swapped: int, seconds: float) -> None:
    plan = checked(plan_of("block_swap", inference(), budget_bytes)).plan
    assert len({swap.buffer for swap in plan.swaps}) == swapped
    assert plan.predicted_seconds == pytest.approx(seconds)
    assert plan.predicted_peak_bytes <= budget_bytes


def test_a_peer_gives_up_where_all_layers_are_too_few() -> None:
    assert plan_of("block_swap", inference(), 5) is None


def test_block_swap_has_nothing_to_move_where_all_weights_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of("block_swap", training(3, 1, monkeypatch), 1000) is None


def test_zero_offload_updates_after_the_backward_and_copies_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are final at 3 and 4 s and have left at 5 and 7 s; updates end at 8 and 9 s; weights come by 12 s.

    The last op of the backward holds two weights and two gradients of 2 bytes, and three activations of one.
    """
    plan = checked(plan_of("zero_offload", training(2, 1, monkeypatch), 12)).plan
    assert (plan.predicted_seconds, plan.predicted_peak_bytes) == (pytest.approx(12), 11)


def test_torchao_updates_as_gradients_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update ends at 6 s, so that its weights come from 7 to 9 s; the second's, at 8 s, by 11 s."""
    plan = checked(plan_of("torchao", training(2, 1, monkeypatch), 12)).plan
    assert plan.predicted_seconds == pytest.approx(11)


def test_streamed_layers_arrive_while_the_layer_before_them_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes 2 s, a layer 1 s: the forward ends at 7 s, as its first layer stays over the step's end.

    In the backward a layer waits for its weights, and for gradients of the layer before the last one: it ends at 13 s.
    The last gradient has left at 16 s, four updates follow, and the first layer's new weights arrive at 22 s.
    """
    found = checked(plan_of("megatrain", training(4, 1, monkeypatch), 13))
    assert found.plan.predicted_seconds == pytest.approx(22)
    weights = [swap for swap in found.plan.swaps if found.program.buffers[swap.buffer].kind is BufferKind.WEIGHT]
    assert len(weights) == 6
    assert all(swap.out_start is None for swap in weights)


def test_state_that_is_updated_on_the_device_is_copied_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(plan_of("paged_state", training(6, 1, monkeypatch), 80))
    kinds = {swap: found.program.buffers[swap.buffer].kind for swap in found.plan.swaps}
    state = [swap for swap, kind in kinds.items() if kind is BufferKind.OPTIMIZER_STATE]
    assert 0 < len(state) < 6
    assert all(swap.out_start is not None for swap in state)
    assert BufferKind.WEIGHT not in kinds.values()  # as long as state suffices


@pytest.mark.parametrize(("name", "copies"), [("zero_offload", 6), ("torchao", 3)])
def test_gradients_of_micro_batches_leave_one_by_one_or_summed(
    name: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checked(plan_of(name, training(3, 2, monkeypatch), 1000))
    assert len([swap for swap in found.plan.swaps if swap.tier == "gradients"]) == copies


def test_offloaded_inputs_return_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(plan_of("offloaded_inputs", training(6, 1, monkeypatch), 1000))
    assert found.plan.swaps
    assert {found.program.buffers[swap.buffer].kind for swap in found.plan.swaps} == {BufferKind.ACTIVATION}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", PEERS)
def test_every_plan_passes_the_verifier_within_its_budget(
    name: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = training(7, micro_batches, monkeypatch)
    peak_bytes = StepMemory(step, roofline(step, MACHINE)).peak.nbytes
    plans = [plan_of(name, step, peak_bytes * percent // 100) for percent in range(10, 101, 10)]
    fitting = [checked(found).plan for found in plans if found is not None]
    assert len(fitting) == (0 if name == "block_swap" else len(fitting) or -1)
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in fitting)


@pytest.fixture(scope="module")
def decoders() -> dict[str, Program]:
    tokens = torch.empty((2, 16), dtype=torch.int64, device="meta")
    programs = {name: dry_run(next(variants(name, 16)), tokens, device="cpu") for name in ("tiny", "tiny-lora")}
    return {name: training_step(program, ADAMW, micro_batches=2) for name, program in programs.items()}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("model", ["tiny", "tiny-lora"])
def test_plans_of_traced_decoders_pass_the_verifier(name: str, model: str, decoders: dict[str, Program]) -> None:
    step = decoders[model]
    found = plan_of(name, step, StepMemory(step, roofline(step, MACHINE)).peak.nbytes)
    if (name, model) != ("block_swap", "tiny"):
        checked(found)
