"""Failures that other offloaders shipped, each as a property of lmswap, and each seen to fail on a broken lmswap.

`fails_when` runs a test as it is, where it must pass, and once under each breakage, where its assertion must fail: a
test that passes on the broken engine would prove nothing. Where a failure belongs to a part that lmswap does not have
on this machine (pinned memory, CUDA streams and its caching allocator), the test says what stands for it.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import lmswap
import lmswap.session
from lmswap.analyze.memory import StepMemory
from lmswap.errors import LmswapError
from lmswap.hardware.memory import CpuMemory
from lmswap.planner import make_plan, simulate
from lmswap.planner.search import plan_swap
from lmswap.runtime import _C
from lmswap.runtime.engine import SwapEngine
from tests.ir.build import build, unit_machine
from tests.models import CASES, CHAIN, Case
from tests.rewrite.random_planner import plan_at_random
from tests.training import loss_and_gradients, same_bits, session_of

ENGINE = _C.Engine
SMALL = 4096
Breakage = Callable[[pytest.MonkeyPatch], None]


def fails_when(*breakages: Breakage):
    """Also runs the test with lmswap broken in each of these ways, and expects its assertion to fail then."""

    def decorate(test: Callable[[], None]):
        @pytest.mark.usefixtures("no_garbage")
        @pytest.mark.parametrize("breakage", [None, *breakages], ids=lambda b: b.__name__ if b else "whole")
        def run(breakage: Breakage | None) -> None:
            if breakage is None:
                test()
                return
            with pytest.MonkeyPatch.context() as patch:
                breakage(patch)
                with pytest.raises((AssertionError, pytest.fail.Exception)):
                    test()

        run.__doc__, run.__name__ = test.__doc__, test.__name__
        return run

    return decorate


def enabled(case: Case, policy: str = "swap_all", **options) -> nn.Module:
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(case.make(), policy=policy, min_swap_bytes=SMALL, **options)


def step(model: nn.Module, case: Case) -> list[torch.Tensor]:
    """Loss and gradients of one step."""
    torch.manual_seed(1)
    model.zero_grad()
    return loss_and_gradients(model, case.loss(model(case.batch())))


def assert_swapping_changes_no_bit(case: Case) -> None:
    """Two steps under "swap_all" give what two without swapping give."""
    results = []
    for policy in ("none", "swap_all"):
        model = enabled(case, policy)
        results.append(step(model, case) + step(model, case))
        assert (lmswap.report(model).swapped_out_bytes > 0) == (policy == "swap_all")
        lmswap.disable(model)
    assert same_bits(*results)


MIB = 2**20


class Transposed(nn.Module):
    """Saves a square matrix and its transpose, and two halves of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        left, right = h[:, :32], h[:, 32:]
        return (h * h.t()).exp() * torch.cat([left.sin() * right, right.cos() * left], 1)


TRANSPOSED = Case(Transposed, lambda: torch.randn(64, 64))


# --- in the order of the list -----------------------------------------------------------------------------------------


def waits_are_forgotten(driver) -> None:
    driver.ignore_waits(True)


@pytest.mark.parametrize("is_broken", [False, True], ids=["whole", "waits_are_forgotten"])
def test_a_copy_in_comes_after_its_own_late_copy_out(is_broken, emulated_driver):
    """Megatron: a reload that was started before its offload had finished read what was there before.

    On the emulated GPU, where copies are late by random times; broken, streams do not wait for events.
    """
    emulated_driver.set_delay(0.005)
    engine = _C.Engine(driver="cuda", library=emulated_driver.path)
    engine.open_host_tier(64 * MIB)
    engine.reserve("host", 8 * MIB)
    tensors = [torch.randn(MIB // 4) for _ in range(6)]
    if is_broken:
        waits_are_forgotten(emulated_driver)
    with (
        emulated_driver.on_device(*tensors) as values,
        emulated_driver.on_device(*map(torch.zeros_like, tensors)) as back,
    ):
        transfers = []
        for number, (tensor, target) in enumerate(zip(values, back, strict=True)):
            capsule = engine.out_start(number, "host", number * MIB, tensor.data_ptr(), tensor.nbytes, 0)
            token = torch.from_dlpack(capsule)
            transfers.append((token, engine.in_start(number, int(token), target.data_ptr(), target.nbytes, 0)))
        for _, transfer in transfers:
            while not engine.is_finished(transfer):
                pass
        # Found from the calls alone; whether the bytes are wrong too is a matter of who was late.
        assert (len(emulated_driver.take_violations()) > 0) == is_broken
        assert same_bits([target.values for target in back], tensors) or is_broken
        transfers.clear()
        engine.close()


def views_are_told_apart_by_shape_only(patch: pytest.MonkeyPatch) -> None:
    def broken(value, _sizes):
        tensor = value.meta["val"]
        strides = list(torch.empty(tensor.shape).stride())
        return tensor.dtype, list(tensor.shape), strides, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()

    patch.setattr("lmswap.rewrite.views.sized_geometry", broken)


@fails_when(views_are_told_apart_by_shape_only)
def test_a_transposed_view_is_not_taken_for_the_tensor_itself():
    """ms-swift: saved tensors were deduplicated by a key that a transposed view shares with its base."""
    assert_swapping_changes_no_bit(TRANSPOSED)


def tokens_are_found_by_address(patch: pytest.MonkeyPatch) -> None:
    out_start, known = SwapEngine.out_start, {}

    def broken(self, x, *rest):
        first = known.setdefault((self.number, x.data_ptr(), x.shape), x.clone())
        return out_start(self, first, *rest)

    patch.setattr(SwapEngine, "out_start", broken)


@fails_when(tokens_are_found_by_address)
def test_a_tensor_at_a_reused_address_is_another_tensor():
    """TRL: tensors were known by their address, which the allocator gave to the next one."""
    assert_swapping_changes_no_bit(CHAIN)


def offsets_are_in_the_wrong_unit(patch: pytest.MonkeyPatch) -> None:
    def broken(value, _sizes):
        tensor = value.meta["val"]
        offset = tensor.storage_offset() // tensor.element_size()
        return tensor.dtype, list(tensor.shape), list(tensor.stride()), offset, tensor.is_conj(), tensor.is_neg()

    patch.setattr("lmswap.rewrite.views.sized_geometry", broken)


@fails_when(offsets_are_in_the_wrong_unit)
def test_two_halves_of_one_storage_are_two_tensors():
    """TRL: an offset in elements was added to an address in bytes, so views of one storage collided."""
    assert_swapping_changes_no_bit(TRANSPOSED)


def tokens_are_kept(patch: pytest.MonkeyPatch) -> None:
    out_start, kept = SwapEngine.out_start, []
    patch.setattr(SwapEngine, "out_start", lambda *given: kept.append(out_start(*given)) or kept[-1])


def tensors_are_kept(patch: pytest.MonkeyPatch) -> None:
    in_start, kept = SwapEngine.in_start, []
    patch.setattr(SwapEngine, "in_start", lambda *given: kept.append(in_start(*given)) or kept[-1])


@fails_when(tokens_are_kept, tensors_are_kept)
def test_fifty_steps_leave_tier_and_device_as_they_were():
    """TRL, FSDP, TransformerEngine: each step left some memory behind."""
    model = enabled(CHAIN)
    memory, engine = session_of(model).memory, session_of(model).engine.native
    held = set()
    for number in range(50):
        step(model, CHAIN)
        if number % 15 == 4:  # after it has been planned for the last time
            gc.collect()
            held.add((memory.used_tensor_bytes(), engine.live_handles(), lmswap.report(model).tier_used_bytes))
            assert held == {(min(held)[0], 0, 0)}
    lmswap.disable(model)


def nothing_waits_for_a_copy_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SwapEngine, "in_done", lambda self, token, flat: self._swap_in_of.pop(int(token)))


def reads_are_late(patch: pytest.MonkeyPatch) -> None:
    def late(**given) -> _C.Engine:
        return ENGINE(**given, faults="read@*=late:0.005,write@*=jitter:0.005")

    patch.setattr("lmswap.session.engine_setup._C.Engine", late)


@fails_when(nothing_waits_for_a_copy_in)
def test_wherever_a_plan_puts_its_copies_gradients_stay_the_same():
    """A branch of PyTorch: where a reload was not placed as the planner had thought, gradients were wrong."""
    case = CASES["shared_views"]
    with pytest.MonkeyPatch.context() as patch:
        reads_are_late(patch)
        plain = enabled(case, "none")
        expected = step(plain, case)
        lmswap.disable(plain)
        for seed in range(2):
            patch.setattr("lmswap.session.planner.make_plan", plan_at_random(seed))
            patch.setattr("lmswap.session.plan_store.PlanCache.read", lambda cache, program: None)
            model = enabled(case)
            actual = step(model, case)
            lmswap.disable(model)
            assert same_bits(actual, expected)


def saved_tensors_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    rewrite = lmswap.session.compiled_graph.insert_swaps

    def broken(runs, graphs, plan, **given):
        rewrite(runs, graphs, plan, **given)
        (output,) = graphs[0].module.graph.find_nodes(op="output")
        for node in output.args[0][graphs[0].num_user_outputs :]:
            node.meta["saved_tensor_with_no_vc_check"] = True

    patch.setattr("lmswap.session.compiled_graph.insert_swaps", broken)


@fails_when(saved_tensors_are_not_checked)
def test_a_tensor_that_is_changed_after_it_was_saved_is_an_error():
    """Saved-tensor hooks switch autograd's version check off: a change in place then gives wrong gradients silently."""
    model = enabled(Case(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh()), lambda: torch.randn(64, 64)))
    output = model(torch.randn(64, 64))
    output.relu_()
    try:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    finally:
        lmswap.disable(model)


def places_are_rounded_to_powers_of_two(patch: pytest.MonkeyPatch) -> None:
    def rounded(nbytes, unit_bytes):
        return 1 << (max(nbytes, unit_bytes) - 1).bit_length()

    patch.setattr("lmswap.planner.memory.pack_tier._rounded", rounded)


@fails_when(places_are_rounded_to_powers_of_two)
def test_a_tier_takes_what_its_blocks_take():
    """torch's pinned allocator rounds to powers of two. The disk tier stands for that: its arena is the same."""
    case = Case(CHAIN.make, lambda: torch.randn(640, 512))  # 1.25 MiB each
    model = enabled(case)
    step(model, case)
    tier = session_of(model).engine.native.tier_stats("disk")
    plan = session_of(model).current_step().plan
    buffers = lmswap.program(model).buffers
    away = [buffers[swap.buffer].nbytes for swap in plan.swaps]
    lmswap.disable(model)
    assert len(away) > 5
    assert tier.peak_used_bytes <= tier.capacity_bytes <= 1.02 * max(tier.peak_used_bytes, sum(set(away)))
    assert tier.capacity_bytes <= 1.02 * sum(away)


def memory_is_released_when_somebody_looks(patch: pytest.MonkeyPatch) -> None:
    def broken(self, token, x):
        self.native.out_done(int(token), 0)  # the tensor is held until the next sweep

    patch.setattr(SwapEngine, "out_done", broken)


@pytest.mark.slow
@fails_when(memory_is_released_when_somebody_looks)
def test_200_steps_have_the_planned_peak():
    """Memory behind `record_stream` is reused when the allocator finds its event done, at random times, and grows.

    The heap's count of tensor bytes stands for the caching allocator: what is released is free at that op.
    """
    batch = CHAIN.batch()  # there before the step, as its plan has it
    case = Case(CHAIN.make, lambda: batch)
    model = enabled(case)
    memory = session_of(model).memory
    before, peaks, planned = memory.used_tensor_bytes(), set(), 0
    for number in range(200):
        memory.reset_tensor_peak()
        step(model, case)
        if number == 4:  # it has been planned for the last time
            planned = session_of(model).current_step().plan.predicted_peak_bytes
        if number >= 4:
            peaks.add(memory.peak_tensor_bytes() - before)
            assert len(peaks) == 1
            assert max(peaks) <= planned
    lmswap.disable(model)


def reloads_are_held_to_the_end(patch: pytest.MonkeyPatch) -> None:
    in_start, sweep, held = SwapEngine.in_start, SwapEngine.reap_finished_transfers, []
    patch.setattr(SwapEngine, "in_start", lambda *given: held.append(in_start(*given)) or held[-1])
    patch.setattr(SwapEngine, "reap_finished_transfers", lambda self: (held.clear(), sweep(self)))


@fails_when(reloads_are_held_to_the_end)
def test_the_backward_holds_less_than_what_was_swapped():
    """DeepSpeed: buffers that had been reloaded were held to the end of the backward.

    The plan brings each of them back where it is used, so that those held are few.
    """

    def late(policy, program, costs, machine, **limits):
        plan = make_plan(policy, program, costs, machine, **limits)
        swaps = tuple(replace(swap, in_start=swap.first_use) for swap in plan.swaps)
        plan = replace(plan, swaps=swaps, certificate=None)
        return replace(plan, predicted_peak_bytes=simulate(program, costs, machine, plan).peak_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmswap.session.planner.make_plan", late)
        _assert_backward_holds_less_than_was_swapped()


def _assert_backward_holds_less_than_was_swapped() -> None:
    model = enabled(CHAIN)
    memory = session_of(model).memory
    for _ in range(5):
        loss = CHAIN.loss(model(CHAIN.batch()))
        memory.reset_tensor_peak()
        before = memory.used_tensor_bytes()
        loss.backward()
    grown = memory.peak_tensor_bytes() - before
    swapped = lmswap.report(model).swapped_out_bytes
    lmswap.disable(model)
    assert swapped >= 8 * MIB
    assert grown < 0.75 * swapped


def freed_memory_is_kept_without_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CpuMemory, "trim", lambda self: _C.heap_set_limit(2**40))


@fails_when(freed_memory_is_kept_without_limit)
def test_fragments_cost_no_memory():
    """DeepSpeed: out of memory below the budget, as free memory lay in pieces that were too small.

    The CPU's heap stands for the caching allocator with expandable segments.
    """
    model = lmswap.enable(nn.Linear(2, 2))
    numbers = random.Random(0)
    blocks: list[torch.Tensor] = []
    try:
        for _ in range(400):
            if len(blocks) == 12:
                blocks.pop(numbers.randrange(12))
            blocks.append(torch.empty(numbers.randint(MIB, 6 * MIB), dtype=torch.uint8))
        stats = _C.heap_stats()
        assert stats.peak_resident_bytes <= stats.peak_live_bytes
    finally:
        _C.heap_set_limit(0)
        lmswap.disable(model)


def nothing_is_swept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SwapEngine, "reap_finished_transfers", lambda self: None)


@fails_when(nothing_is_swept)
def test_an_exception_in_mid_step_leaves_nothing_held():
    """torchtune: what an exception left behind made the next step fail."""
    plain = enabled(CHAIN, "none")
    expected = step(plain, CHAIN)
    lmswap.disable(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmswap.session.engine_setup._C.Engine", lambda **given: ENGINE(**given, faults="read@2=fail"))
        model = enabled(CHAIN)
        with pytest.raises(LmswapError, match="Input/output error"):
            step(model, CHAIN)
        actual = step(model, CHAIN)
        step(model, CHAIN)
    engine = session_of(model).engine
    left = len(engine._in_flight), len(engine._swap_in_of), engine.native.live_handles()
    lmswap.disable(model)
    assert same_bits(actual, expected)
    assert left == (0, 0, 0)


def bytes_come_back_once(patch: pytest.MonkeyPatch) -> None:
    in_start, seen = SwapEngine.in_start, set()

    def broken(self, token, buffer, device):
        flat = in_start(self, token, buffer, device)
        key = self.number, int(token)
        if key not in seen:
            seen.add(key)
            return flat
        return torch.zeros_like(flat)

    patch.setattr(SwapEngine, "in_start", broken)


@fails_when(bytes_come_back_once)
def test_saved_tensors_can_be_unpacked_twice():
    """torchtune: the second unpack of a tensor found it untracked. Double backward is refused by torch, clearly."""
    results = []
    for policy in ("none", "swap_all"):
        model = enabled(CASES["shared_views"], policy)
        loss = CASES["shared_views"].loss(model(torch.ones(256, 64)))
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
        lmswap.disable(model)
    assert same_bits(*results)


@fails_when(tokens_are_kept)
def test_forwards_without_backward_leave_nothing():
    """Megatron: a forward in evaluation, or one whose output was not used, left its tensors on the host."""
    model = enabled(CHAIN)
    for _ in range(3):
        model(CHAIN.batch())  # its graph dies at once
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(CHAIN.batch())
    gc.collect()
    native = session_of(model).engine.native
    left = native.live_handles(), native.tier_stats("disk").used_bytes
    lmswap.disable(model)
    assert left == (0, 0)


def it_swaps_though_all_fits(patch: pytest.MonkeyPatch) -> None:
    def broken(problem):
        return plan_swap(replace(problem, budget_bytes=problem.memory.peak.nbytes - 1))

    patch.setitem(lmswap.planner._POLICIES, "auto", broken)


@fails_when(it_swaps_though_all_fits)
def test_nothing_is_moved_where_that_gains_nothing():
    """ms-swift: at small sizes offloading raised the peak."""
    step = build(
        """
        forward
        f1 9: x -> a
        f2 9: a -> b
        f3 9: b -> y
        backward
        g1 9: t a -> gx
        """,
        sizes={"a": 4, "b": 4},
        outputs="y",
        tangents="t",
        gradients="gx",
    )
    peak = StepMemory(step.program, step.costs).peak.nbytes
    limits = {"tier": "host", "min_swap_bytes": 1}
    machine = unit_machine(out=10.0, into=10.0)
    for budget_bytes in (peak, 10 * peak):
        plan = make_plan("auto", step.program, step.costs, machine, budget_bytes=budget_bytes, **limits)
        assert plan.swaps == plan.recomputes == ()
        assert plan.predicted_peak_bytes <= peak


def the_model_runs_uncaptured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lmswap.dispatch.ModelCall.__call__", lambda call, *given: call._plain(*given))


@fails_when(the_model_runs_uncaptured)
def test_the_report_shows_swapped_bytes_or_the_reason_for_none():
    """TFLMS: users could not see whether it was on."""
    model = enabled(CHAIN)
    step(model, CHAIN)
    report = lmswap.report(model)
    lmswap.disable(model)
    assert (report.swapped_out_bytes or 0) >= 8 * MIB
    assert (report.swapped_in_bytes or 0) >= 8 * MIB
    model = enabled(CHAIN, "auto", budget="4GiB")
    step(model, CHAIN)
    report, explanation = lmswap.report(model), lmswap.explain(model)
    lmswap.disable(model)
    assert report.swapped_out_bytes == 0
    assert all(row.reason for row in explanation.decisions)


def the_host_budget_is_ignored(patch: pytest.MonkeyPatch) -> None:
    as_requested = lmswap.session.engine_setup.as_requested
    patch.setattr(
        "lmswap.session.engine_setup.as_requested",
        lambda machine, tier, options: as_requested(machine, tier, replace(options, host_budget_bytes=None)),
    )


@fails_when(the_host_budget_is_ignored)
def test_a_tier_that_is_too_small_is_an_error_before_the_first_op():
    """TFLMS: too little host memory killed the process in mid-training."""
    model = enabled(CHAIN, host_budget=2 * MIB)
    ran: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        compiled = lmswap.session.compiled_graph.compile_boxed
        patch.setattr("lmswap.session.compiled_graph.compile_boxed", lambda module: ran.append(1) or compiled(module))
        try:
            with pytest.raises(LmswapError, match=r"tier|MiB"):
                step(model, CHAIN)
        finally:
            lmswap.disable(model)
    assert ran == []
