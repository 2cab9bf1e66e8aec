"""Ops are metered on a GPU without harm, and ops that do not repeat their bits are not recomputed."""

import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lmswap
from lmswap import api
from lmswap.analyze.cost import unit
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.capture.op_costs.trials import seconds_by_events
from lmswap.errors import DriverError
from lmswap.hardware.memory import device_memory
from lmswap.runtime.recorder import Recorder
from tests.capture.captured import Recording, capture
from tests.models import Case
from tests.rewrite.random_planner import plan_at_random
from tests.rewrite.random_recomputes import recompute_all

MIB = 2**20


def train(case, *, policy="none", num_steps=3, before_step=lambda: None, **options):
    """Losses and gradients of all steps, and the model, which is enabled."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(case.make().cuda(), policy=policy, min_swap_bytes=4096, **options)
    results = []
    for _ in range(num_steps):
        before_step()
        loss = case.loss(model(case.batch().cuda()))
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return model, results


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x):
        query, key, value = self.layer(x).view(2, 64, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.3).tanh()


@pytest.mark.parametrize("policy", ["swap_all", "recompute"])
def test_seeds_of_attention_are_on_the_host_where_the_backward_reads_them(policy, emulated_gpu):
    case = Case(Attention, lambda: torch.randn(2, 64, 32))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        plain, expected = train(case)
        model, found = train(case, policy=policy)
    targets = [op.target for op in lmswap.program(model).ops]
    assert "aten._scaled_dot_product_efficient_attention_backward.default" in targets
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for each in (plain, model):
        lmswap.disable(each)


class Wide(nn.Module):
    """Makes 64 MiB of 64 KiB, and adds them up."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return (x * self.scale).unsqueeze(0).expand(1024, -1).exp().sum()


def test_an_op_too_large_to_time_is_noted_with_estimated_scratch(emulated_gpu, monkeypatch):
    notes = []
    device = torch.device("cuda")
    meter = OpProfiler(device, device_memory(device), unit, notes.append)
    monkeypatch.setattr(Recording, "output_metadata", meter.output_metadata)
    recording, _ = capture(Wide().cuda(), torch.ones(16384, device="cuda"))
    (lowered,) = recording.lowered
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    emulated_gpu.set_capacity(total_bytes - free_bytes + 100 * MIB)
    costs = meter.costs(lowered.program, lowered.graphs)
    scratch_bytes = {op.name: costs.scratch_bytes[op.index] for op in lowered.program.ops}
    assert scratch_bytes["exp"] == scratch_bytes["mul_1"] == 64 * MIB
    assert scratch_bytes["mul"] == 0
    assert any("'exp' (test_metering.py" in note and "did not fit" in note and "64.00 MiB" in note for note in notes)


@pytest.fixture
def logged(monkeypatch):
    """What happens to events that time, and to an operator, in order."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append(self)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return {1: 0.5, 2: 7.0}[log.index(end) - log.index(self)]  # of a fill, of the op

    def kernel(x):
        log.append("op")
        return x.exp()

    library = torch.library.Library("lmswap_logged", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", kernel, "CUDA")
    torch.library.register_fake("lmswap_logged::op", torch.empty_like, lib=library)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    yield log
    library._destroy()


class Logged(nn.Module):
    def forward(self, x):
        return torch.ops.lmswap_logged.op(x)


def test_the_time_of_an_op_is_that_between_events_around_its_launch(logged):
    device = torch.device("cuda")
    meter = OpProfiler(device, device_memory(device), unit)
    recording, _ = capture(Logged(), torch.ones(4, device="cuda"))
    (lowered,) = recording.lowered
    logged.clear()
    assert meter.costs(lowered.program, lowered.graphs).seconds == (0.007,)
    assert sum(entry == "op" for entry in logged) > 3  # what is not timed stands before the first event


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        rows = torch.arange(256, device=x.device) % 16
        added = torch.zeros(16, 64, device=x.device).index_add(0, rows, self.layer(x))
        return torch.tanh(added[rows] * x).exp()


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return torch.tanh(self.second(self.first(x).exp().tanh()))


UNREPEATABLE = {
    "sums_in_any_order": (Case(Sums, lambda: torch.randn(256, 64)), "index_add"),
    "kernels_by_thread": (Case(Convolutions, lambda: torch.randn(2, 4, 32, 32)), "convolution"),
}


@pytest.mark.parametrize("kind", UNREPEATABLE)
@pytest.mark.parametrize("is_seen", [True, False])
def test_ops_that_are_not_bitwise_repeatable_are_not_recomputed(kind, is_seen, emulated_gpu, monkeypatch):
    monkeypatch.setattr("lmswap.session.plan_store.PlanCache.read", lambda cache, program: None)
    case, name = UNREPEATABLE[kind]
    # How often ops are timed in the first steps depends on the machine's load, and with it the order of later sums.
    how = {"num_steps": 6, "before_step": lambda: emulated_gpu.configure_kernels(**{kind: True})}
    plain, expected = train(case, **how)
    lmswap.disable(plain)
    if not is_seen:  # as if every op repeated its bits
        monkeypatch.setattr(OpProfiler, "is_deterministic", lambda meter, node: True)
    monkeypatch.setattr(
        "tests.rewrite.random_planner.random_recomputes", lambda program, rng, share: recompute_all(program)
    )
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(0))
    model, found = train(case, **how)
    ops = [op for op in lmswap.program(model).ops if name in op.target and "backward" not in op.target]
    assert ops
    assert all(op.is_repeatable == (not is_seen) for op in ops)
    assert lmswap.report(model).recomputed_bytes > 0
    last = len(expected) // how["num_steps"]
    assert all(torch.equal(a, b) for a, b in zip(found[-last:], expected[-last:], strict=True)) == is_seen
    lmswap.disable(model)


@pytest.fixture
def picky():
    """An operator whose kernel asserts on the device that its numbers are large."""

    def kernel(x):
        return nn.functional.embedding((x < 100).long(), torch.ones(1, 4, device=x.device))

    library = torch.library.Library("lmswap_picky", "DEF")
    library.define("pick(Tensor x) -> Tensor")
    library.impl("pick", kernel, "CUDA")
    torch.library.register_fake("lmswap_picky::pick", lambda x: x.new_empty(*x.shape, 4), lib=library)
    yield torch.ops.lmswap_picky.pick
    library._destroy()


def test_an_op_that_breaks_the_device_on_made_up_inputs_is_named(picky, emulated_gpu, capfd):
    model = nn.Sequential(nn.Linear(4, 4)).cuda()
    model.forward = lambda x: picky(x + 200).sum()
    lmswap.enable(model)
    with pytest.raises(DriverError, match=r"op 'pick' .*broke the device when timed on synthetic inputs"):
        model(torch.ones(4, device="cuda"))
    emulated_gpu.mend()
    lmswap.disable(model)


def test_the_host_s_time_for_queueing_an_op_is_not_the_op_s(emulated_gpu):
    x, host_seconds = torch.ones(16, device="cuda"), 0.02

    def run():
        time.sleep(host_seconds)
        x.add_(1)

    run()
    torch.cuda.synchronize()
    emulated_gpu.configure_compute(memory_rate=2e9, latency_seconds=1e-4)  # a fill takes 1 ms
    assert seconds_by_events(run, x.device, 3, host_seconds) < host_seconds / 2  # of the emulated device's clock


def test_host_bound_ops_are_timed_as_they_run(emulated_gpu, monkeypatch):
    kernel_seconds, mark_seconds = 1e-3, 4e-3
    mark = Recorder._mark

    def slow_mark(recorder):
        time.sleep(mark_seconds)
        return mark(recorder)

    emulated_gpu.configure_compute(latency_seconds=kernel_seconds)
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Tanh() for _ in range(20))).cuda()
    lmswap.enable(model, policy="none")
    monkeypatch.setattr(Recorder, "_mark", slow_mark)
    for _ in range(4):
        model(torch.ones(8, 8, device="cuda")).sum().backward()
    step = api._session(model).current_step()
    ops = step.merged.program.ops
    tanhs = [seconds for op, seconds in zip(ops, step.costs.seconds, strict=True) if op.target.startswith("aten.tanh")]
    assert len(tanhs) == 40
    assert 0.9 * kernel_seconds < statistics.median(tanhs) < 2 * kernel_seconds
    lmswap.disable(model)
