"""Tracebacks through an enabled model: the frames that they show, and the objects that they keep alive."""

import traceback

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError, PlanInfeasible
from lmswap.session.compiled_graph import CapturedGraph
from lmswap.session.diagnostics import warn


def names(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_of_a_graphs_op_shows_the_users_calls_and_no_compiler():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x, index):
            return self.inner(x)[index]

    torch.compiler.reset()
    model = lmswap.enable(Outer(), "2GiB")
    x = torch.randn(4, 8)
    model(x, torch.tensor([0, 1])).sum().backward()
    with pytest.raises(IndexError) as caught:
        model(x, torch.tensor([0, 9]))  # which only the op itself can see
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not any("_functorch" in file or "eval_with_key" in file for file in files)
    assert "forward" in names(caught.value)
    assert names(caught.value).count("__call__") == 1
    lmswap.disable(model)


def without_lines(code):
    full, rest = divmod(len(code.co_code) // 2, 8)  # an entry of Python 3.11's table covers at most 8 instructions
    return code.replace(co_linetable=b"\xff" * full + bytes([0xF7 + rest] if rest else []))


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_code_without_lines_raises_warns_and_trains_as_other_code(compiler):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x, index):
            return self.linear(x).tanh()[index]

    Net.forward.__code__ = without_lines(Net.forward.__code__)
    torch.compiler.reset()
    model = lmswap.enable(Net(), policy="swap_all", min_swap_bytes=1024, compiler=compiler)
    x = torch.randn(64, 64)
    for _ in range(3):
        model(x, torch.tensor([0, 1])).sum().backward()
    try:
        model(x, torch.tensor([0, 99]))
    except Exception as error:  # not pytest.raises: pytest 9 cannot print frames without lines
        raised = error
    assert type(raised) is IndexError
    assert "forward" in names(raised)
    assert lmswap.report(model).swapped_out_bytes > 0

    code = without_lines(compile("warn('no line', UserWarning)", "a file without lines", "exec"))
    with pytest.warns(UserWarning, match="no line"):
        exec(code, {"warn": warn})
    lmswap.disable(model)


def test_an_error_of_lmswap_itself_keeps_its_frames(monkeypatch):
    torch.compiler.reset()
    model = lmswap.enable(nn.Linear(8, 8), "2GiB")
    model(torch.randn(4, 8)).sum().backward()

    monkeypatch.setattr(CapturedGraph, "graph_for_this_run", None)  # not callable
    with pytest.raises(TypeError) as caught:
        model(torch.randn(4, 8))
    assert "_call_captured" in names(caught.value)
    lmswap.disable(model)


def test_a_budget_that_is_refused_shows_no_more_than_the_call():
    torch.compiler.reset()
    model = lmswap.enable(nn.Linear(8, 8), "1MiB")
    with pytest.raises(PlanInfeasible) as caught:
        model(torch.randn(4, 8))
    assert names(caught.value).count("__call__") == 1
    assert not {"_call_captured", "make", "search"} & {*names(caught.value)}
    lmswap.disable(model)


@pytest.mark.parametrize("wrong", [{"budget": "1XB"}, {"polcy": "auto"}])
def test_an_option_that_cannot_be_read_shows_no_more_than_the_call(wrong):
    with pytest.raises(OptionError) as caught:
        lmswap.enable(nn.Linear(2, 2), **wrong)
    assert names(caught.value)[1:] == ["enable"]
