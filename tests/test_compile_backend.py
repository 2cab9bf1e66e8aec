"""torch.compile(model, backend="lmswap"): each call of torch.compile is one session, which ends with its result."""

import gc
import weakref

import pytest
import torch
from torch import nn

import lmswap
from lmswap import api
from lmswap.errors import OptionError, TransferError
from lmswap.session.session import Session


class Net(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.breaks = breaks
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.last(x))


@pytest.fixture(autouse=True)
def new_cache():
    torch.compiler.reset()


def compiled(breaks=False, **given):
    return torch.compile(Net(breaks), backend="lmswap", **given)


def step(model, rows=2):
    loss = model(torch.randn(rows, 8)).square().mean()
    loss.backward()


@pytest.mark.parametrize("given", [{}, {"options": {"budget": "2GiB"}}])
def test_each_call_of_torch_compile_has_a_session_of_its_own(given):
    models = [compiled(**given) for _ in range(2)]
    for _ in range(2):
        for model in models:
            step(model)
    first, second = map(api._session, models)
    assert [len(first.graphs), len(second.graphs)] == [1, 1]
    assert first.engine is not second.engine
    lmswap.disable(models[0])
    step(models[1])
    assert lmswap.report(models[1]).steps == 3
    lmswap.disable(models[1])


def test_two_compiled_modules_of_one_model_have_a_session_each():
    model = Net()
    modules = [torch.compile(model, backend="lmswap", options={"budget": budget}) for budget in ("2GiB", "1GiB")]
    for module in modules:
        step(module)
    assert [lmswap.report(module).budget_bytes for module in modules] == [2**31, 2**30]
    for module in modules:
        lmswap.disable(module)


def test_a_model_compiled_by_another_backend_is_not_enabled():
    managed, other = compiled(), torch.compile(Net(), backend="eager")
    step(managed)
    step(other)
    with pytest.raises(OptionError, match="not enabled"):
        lmswap.report(other)
    lmswap.disable(other)
    step(managed)
    lmswap.disable(managed)


def test_a_disabled_module_refuses_calls_of_new_shapes_too():
    others = {*api.sessions()}  # of tests before
    model = compiled()
    step(model)
    lmswap.disable(model)
    for rows in (2, 3, 4):
        with pytest.raises(TransferError, match="closed"):
            step(model, rows)
    assert {*api.sessions()} <= others


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("rows", [[2], [2, 3]])
@pytest.mark.usefixtures("no_garbage")
def test_the_session_ends_with_the_compiled_module_once_no_backward_is_pending(breaks, rows):
    num_open, model = len(Session._open), Net(breaks)
    module = torch.compile(model, backend="lmswap", options={"policy": "swap_all", "min_swap_bytes": 1})
    for count in rows:  # the second makes sizes dynamic
        step(module, count)
    session = weakref.ref(api._session(module))
    loss = module(torch.randn(rows[-1], 8)).square().mean()
    del module
    gc.collect()
    loss.backward()
    del loss
    gc.collect()
    assert (session(), len(Session._open)) == (None, num_open)
