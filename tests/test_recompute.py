"""Plans that recompute, followed by enabled models end to end."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Lane, Timeline
from lmswap.planner import simulate, verify
from tests.models import CASES, Broken, Case, quick_of
from tests.rewrite.random_planner import plan_at_random
from tests.rewrite.random_recomputes import recompute_all

MODELS = {name: CASES[name] for name in ("resnet", "encoder", "shared_views")}
MODELS["broken"] = Case(Broken, lambda: torch.randn(64, 128))


pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


def plan_all_again(policy, program, costs, machine, **limits):
    """A planner that keeps no recomputable buffer for the backward, except for the caller's."""
    given = {buffer.id for buffer in program.buffers if buffer.kind is BufferKind.OUTPUT}
    recomputes = tuple(
        recompute for recompute in recompute_all(program) if not given.intersection(program.ops[recompute.op].writes)
    )
    plan = Plan("all again", 2**40, (), 1.0, 0, recomputes=recomputes)
    plan = replace(plan, predicted_peak_bytes=simulate(program, costs, machine, plan).peak_bytes)
    verify(program, costs, machine, plan)
    return plan


def train(case: Case, *, retain_graph: bool = False):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(case.make(), policy="none")
    results = []
    for _ in range(3):
        loss = case.loss(model(case.batch()))
        if retain_graph:
            loss.backward(retain_graph=True)
        loss.backward()
        results += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters()), torch.rand(3)]
    results += [value.clone() for value in model.state_dict().values()]
    return model, results


def num_copies(timeline: Timeline) -> int:
    return sum(span.lane in (Lane.OUT, Lane.IN) for span in timeline.spans)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick_of(MODELS, ["resnet", "shared_views"]))
def test_plans_that_recompute_are_bitwise_equal(name, seed, monkeypatch):
    plain, expected = train(MODELS[name])
    lmswap.disable(plain)
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(seed))
    model, actual = train(MODELS[name])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    report = lmswap.report(model)
    assert report.recomputed_bytes > 0
    assert num_copies(report.measured) == num_copies(report.predicted) > 0
    lmswap.disable(model)


def test_a_retained_graph_computes_again_in_each_backward(monkeypatch):
    plain, expected = train(MODELS["resnet"], retain_graph=True)
    lmswap.disable(plain)
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(1))
    model, actual = train(MODELS["resnet"], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    lmswap.disable(model)


def test_records_name_recomputed_buffers_after_the_dropped_ones(monkeypatch):
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(0))
    model, _ = train(MODELS["broken"])
    program, measured = lmswap.program(model), lmswap.report(model).measured
    moved = [span for span in measured.spans if span.lane in (Lane.OUT, Lane.IN)]
    assert moved
    for span in moved:
        assert span.name == program.buffer_names[span.buffer]
        assert span.nbytes == program.buffers[span.buffer].nbytes
    lmswap.disable(model)


class Unsaved(nn.Module):
    """Plain torch saves neither its batch nor its buffer nor the features that it gives: only what was made of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        features = self.first(torch.relu(x - self.mean).add(1))
        return features, self.second(torch.tanh(features))


WRITES = {
    "the batch behind torch's back": lambda model, x, features: x.data.fill_(7.0),
    "the batch in place": lambda model, x, features: x.zero_(),
    "the batch, which is freed": lambda model, x, features: x.untyped_storage().resize_(0),
    "a buffer": lambda model, x, features: model.mean.add_(1.0),
    "an output behind torch's back": lambda model, x, features: features.data.fill_(7.0),
    "an output in place": lambda model, x, features: features.detach().zero_(),
}


def train_writing(write, **options):
    torch.manual_seed(0)
    torch.compiler.reset()
    model, results = Unsaved(), []
    if options:
        lmswap.enable(model, **options)
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(256, 64)
        features, y = model(x)
        loss = y.square().mean() + features.mean()
        write(model, x, features)
        loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    recomputed_bytes = lmswap.report(model).recomputed_bytes if options else 0
    lmswap.disable(model)
    return results, recomputed_bytes


@pytest.mark.parametrize("written", WRITES)
def test_writes_to_tensors_that_plain_torch_does_not_save_change_no_bits(written, monkeypatch):
    expected, _ = train_writing(WRITES[written])
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_all_again)
    actual, recomputed_bytes = train_writing(WRITES[written], policy="none")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert recomputed_bytes > 0


def train_without_onednn(around, **options):
    """Trains with kernels for the forward that round differently from those of the backward."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, results = CASES["resnet"].make(), []
    if options:
        lmswap.enable(model, **options)
    try:
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            with around():
                loss = CASES["resnet"].loss(model(CASES["resnet"].batch()))
            loss.backward()
            results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    finally:
        if options:
            lmswap.disable(model)
    return results


@pytest.mark.cpu_only("oneDNN's kernels are the CPU's")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_recomputing_under_changed_torch_settings_is_refused(monkeypatch):
    without = partial(torch.backends.mkldnn.flags, enabled=False)
    expected = train_without_onednn(without)
    assert not all(map(torch.equal, expected, train_without_onednn(nullcontext)))
    assert all(map(torch.equal, expected, train_without_onednn(without, policy="swap_all", min_swap_bytes=4096)))
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_all_again)
    with pytest.raises(OptionError, match=r"round differently: torch\.backends\.mkldnn\.enabled was False and is True"):
        train_without_onednn(without, policy="none")


@contextmanager
def flushing_denormals():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def another_number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.cpu_only("a GPU's ops depend on neither")
@pytest.mark.parametrize(
    ("around", "name"), [(flushing_denormals, "set_flush_denormal"), (another_number_of_threads, "get_num_threads")]
)
def test_recomputation_by_a_thread_in_another_mode_is_refused(around, name, monkeypatch):
    expected = train_without_onednn(around)
    assert all(map(torch.equal, expected, train_without_onednn(around, policy="swap_all", min_swap_bytes=4096)))
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_all_again)
    with pytest.raises(OptionError, match=rf"round differently: torch\.{name}"):
        train_without_onednn(around, policy="none")


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_settings_may_change_between_steps(monkeypatch):
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_all_again)
    model = lmswap.enable(CASES["resnet"].make(), policy="none")
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            CASES["resnet"].loss(model(CASES["resnet"].batch())).backward()
    assert lmswap.report(model).recomputed_bytes > 0
    lmswap.disable(model)
