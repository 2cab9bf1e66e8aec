"""Traces of shapes that are not used any more are evicted, without a trace in the results."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import lmswap
from lmswap.api import _sessions
from lmswap.capture.specialize import SizesOutgrown
from lmswap.errors import CaptureError, PlanInfeasible
from lmswap.runtime import _C
from lmswap.session import compiled_graph, traces
from lmswap.session.compiled_graph import CapturedGraph, Evicted
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import PlannedStep


class Reader(nn.Module):
    """Also draws, writes running statistics, and breaks its graph."""

    def __init__(self, breaks=False):
        super().__init__()
        self.breaks = breaks
        self.first, self.norm, self.last = nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        h = nn.functional.dropout(self.norm(self.first(x)).sigmoid(), 0.25)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(h.transpose(1, 2)).mul(h.size(2))


def models(**options):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Reader(**options)
    model = lmswap.enable(copy.deepcopy(plain), "2GiB", policy="swap_all", min_swap_bytes=1)
    return plain, model, _sessions[model]


def step(model, length):
    torch.manual_seed(length)
    model.zero_grad()
    loss = model(torch.randn(3, 2, length)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def assert_same(plain, model, lengths):
    for length in lengths:
        assert all(map(torch.equal, step(plain, length), step(model, length)))


def evicted(session):
    return [graph.index for graph in session.graphs if isinstance(graph, Evicted)]


def test_what_a_trace_leaves_is_collected_once(monkeypatch):
    _, model, _ = models()
    collected, collect = [], gc.collect
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(generation) or collect(*generation))
    model(torch.randn(3, 2, 8))
    assert collected == [()]


@pytest.mark.cpu_only("on a GPU a trace takes none of the memory that a budget counts")
def test_what_steps_leave_for_reuse_is_released_before_torch_traces_or_other_sizes_are_planned(monkeypatch):
    torch.compiler.reset()
    layers = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Tanh())
    model = lmswap.enable(layers, "2GiB", policy="swap_all", min_swap_bytes=1)
    capture_again, found = CapturedGraph.capture_again, []

    def note(graph):
        found.append(_C.heap_reusable_bytes())
        capture_again(graph)

    monkeypatch.setattr(CapturedGraph, "capture_again", note)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch._dynamo.callback_handler, "start_callbacks", [lambda _: found.append(_C.heap_reusable_bytes())]
        )
        for length in (2**13, 2**12, 2**11, 2**14):
            model(torch.randn(length, 64)).sum().backward()
            assert _C.heap_reusable_bytes() > 2**22
    assert len(found) == 4  # three traces, and a plan
    assert max(found) < 2**23  # but for parts of huge pages
    lmswap.disable(model)


@pytest.fixture
def soon(monkeypatch):
    """Lets traces count as unused after three steps."""
    monkeypatch.setattr(traces, "UNUSED_STEPS", 3)
    monkeypatch.setattr(traces, "_LOOK_EVERY", 1)


@pytest.mark.parametrize("breaks", [False, True])
def test_an_unused_trace_is_evicted_and_retracing_is_bitwise_equal(soon, breaks):
    plain, model, session = models(breaks=breaks)
    assert_same(plain, model, [6])
    held = [weakref.ref(graph.function) for graph in session.graphs]
    assert len(held) == 1 + breaks
    assert_same(plain, model, [7, 7, 7, 7, 7])
    gc.collect()
    assert evicted(session) == list(range(1 + breaks))
    assert not any(reference() for reference in held)
    assert_same(plain, model, [6, 7, 6, 7, 6])
    assert len(session.graphs) == 3 * (1 + breaks)
    assert session.traces.num_kept == 2 * (1 + breaks)
    session.traces.nbytes = 2**20  # measured as resident memory, of which small traces need no more in a used process
    assert f"1.00 MiB came with {2 * (1 + breaks)} traces" in " ".join(str(lmswap.report(model)).split())
    lmswap.disable(model)


def test_a_backward_after_the_eviction_of_its_trace_is_bitwise_equal(soon):
    plain, model, session = models()
    torch.manual_seed(1)
    x = torch.randn(3, 2, 6)
    losses = []
    for each in (plain, model):
        torch.manual_seed(2)
        losses.append(each(x).square().mean())
    assert_same(plain, model, [7, 7, 7, 7, 7])
    assert evicted(session) == [0]
    for each, loss in zip((plain, model), losses, strict=True):
        each.zero_grad()
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    lmswap.disable(model)


def test_eviction_leaves_traces_of_other_models_of_the_class(soon):
    plain, model, session = models()
    other = lmswap.enable(copy.deepcopy(plain), "2GiB", policy="swap_all", min_swap_bytes=1)
    step(other, 6)
    for length in (6, 7, 7, 7, 7, 7):
        step(model, length)
    assert evicted(session) == [0]
    step(other, 6)
    assert len(_sessions[other].graphs) == 1
    lmswap.disable(model)
    lmswap.disable(other)


def test_planning_is_retried_without_least_recently_used_traces(monkeypatch):
    plain, model, session = models()
    assert_same(plain, model, [6, 7, 8])
    make, refused = StepPlans.make, []

    def refuse_once(plans, graphs, *others, **given):
        if not refused:
            refused.append(graphs)
            raise PlanInfeasible(budget_bytes=1, needed_bytes=2, where="op 0", live=(), policy="auto")
        return make(plans, graphs, *others, **given)

    monkeypatch.setattr(StepPlans, "make", refuse_once)
    session.traces.nbytes = 2**20  # see above
    assert_same(plain, model, [9])
    assert refused == [(3,)]
    assert evicted(session) == [0]
    lmswap.disable(model)


@pytest.mark.cpu_only("on a GPU each size has a trace of its own")
@pytest.mark.parametrize("is_outgrown", [False, True])
def test_plans_for_other_sizes_are_made_while_those_of_their_trace_are_evicted(is_outgrown, monkeypatch):
    plain, model, session = models()
    assert_same(plain, model, [6, 7, 8, 40, 40, 40, 40])
    make, refused = StepPlans.make, []

    def refuse_thrice(plans, graphs, *others, **given):
        if len(refused) < 3:
            refused.append(graphs)
            raise PlanInfeasible(budget_bytes=1, needed_bytes=2, where="op 0", live=(), policy="auto")
        return make(plans, graphs, *others, **given)

    monkeypatch.setattr(StepPlans, "make", refuse_thrice)
    if is_outgrown:  # the largest sizes of the bucket: the others are planned next
        monkeypatch.setattr(PlannedStep, "excess_bytes", 1)
    session.traces.nbytes = 2**20  # see above
    assert_same(plain, model, [300])
    assert refused == [(4,)] * 3
    assert evicted(session) == [0, 1, 2]
    lmswap.disable(model)


def test_a_trace_that_a_call_has_selected_is_not_evicted(soon):
    plain, model, session = models()
    assert_same(plain, model, [6, 7, 7, 6])
    assert evicted(session) == []
    lmswap.disable(model)


@pytest.mark.cpu_only("on a GPU each size has a trace of its own")
def test_traces_that_are_evicted_while_one_is_selected_serve_no_call(monkeypatch):
    plain, model, session = models()
    assert_same(plain, model, [6, 7, 8, 40])
    fit, evicted_in = CapturedGraph.fit, []

    def evict_first(graph, sizes):
        if not evicted_in:
            session.traces.evict_complete()
            evicted_in.append(graph.index)
            raise SizesOutgrown
        fit(graph, sizes)

    monkeypatch.setattr(CapturedGraph, "fit", evict_first)
    assert_same(plain, model, [300])
    assert evicted_in == [2]
    lmswap.disable(model)


def test_traces_take_no_more_than_their_share_of_the_budget(monkeypatch):
    plain, model, session = models()
    monkeypatch.setattr(type(session), "may_share_plans", property(lambda _: False))
    monkeypatch.setattr(session.memory, "other_bytes", lambda: session.traces.num_kept * 2**28)  # 256 MiB each
    for length in range(6, 10):
        assert_same(plain, model, [length, length, length])
        max_bytes = traces.MAX_SHARE * session.budget.nbytes
        assert session.traces.nbytes == session.traces.num_kept * 2**28 <= max_bytes + 2**28  # the newest comes on top
    assert evicted(session) == [0, 1]
    assert_same(plain, model, [9, 8, 6, 6, 6])
    assert evicted(session) == [0, 1, 3]
    text = " ".join(str(lmswap.report(model)).split())
    assert "512.00 MiB came with 2 traces; 3 used least recently were evicted" in text
    lmswap.disable(model)


def test_a_graph_that_fails_after_planning_leaves_no_plan(monkeypatch):
    plain, model, session = models()

    def fail(*_, **__):
        raise CaptureError("this graph cannot be rewritten")

    with monkeypatch.context() as patch:
        patch.setattr(compiled_graph, "insert_swaps", fail)
        assert_same(plain, model, [6])  # hooks serve it
    assert (session.graphs, session.plans.newest()) == ([], None)
    lmswap.disable(model)


@pytest.mark.parametrize(("compiler", "breaks"), [("fx", False), ("fx", True), ("eager", False)])
def test_disable_frees_the_session_and_its_own_traces_only(compiler, breaks):
    torch.compiler.reset()
    model, other = Reader(breaks), Reader(breaks)
    for each in (model, other):
        lmswap.enable(each, "2GiB", policy="swap_all", min_swap_bytes=1, compiler=compiler)
        for _ in range(3):
            step(each, 6)
    session, num_graphs = weakref.ref(_sessions[model]), len(_sessions[other].graphs)
    held = [weakref.ref(graph) for graph in session().graphs]
    lmswap.disable(model)
    gc.collect()
    assert session() is None
    assert breaks or not any(reference() for reference in held)  # at a graph break Dynamo holds what is left of them
    step(other, 6)
    assert len(_sessions[other].graphs) == num_graphs
    lmswap.disable(other)
    model = weakref.ref(model)
    gc.collect()
    assert model() is None
