"""Exceptions of signal handlers reach the caller from any interrupted code, and lose no trace."""

import contextlib
import copy
import dis
import functools
import itertools
import random
import signal
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._dynamo.variables.builder import VariableBuilder

import lmswap
from lmswap.capture.interrupts import interrupt_in, raise_interrupt
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.capture.recompiles import tracing_settings
from lmswap.session.step_planning import StepPlanning


class Stop(Exception):
    """What the handlers of these tests raise."""


class Handler:
    def __call__(self, *_):
        raise Stop

    def method(self, *_):
        raise Stop


def handle(*_):
    raise Stop


@contextlib.contextmanager
def handling(handler=handle):
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted():
    signal.raise_signal(signal.SIGALRM)


def wrapped():
    try:
        interrupted()
    except Exception as error:
        raise RuntimeError("something failed").with_traceback(error.__traceback__) from None


@pytest.mark.parametrize(
    "handler", [handle, Handler(), Handler().method, functools.partial(handle, 1), lambda *_: handle()]
)
@pytest.mark.parametrize("run", [interrupted, wrapped])
def test_a_handlers_exception_is_found_behind_the_one_raised_instead(handler, run):
    with handling(handler):
        try:
            run()
        except Exception as error:
            assert type(interrupt_in(error)) is Stop
            with pytest.raises(Stop):
                raise_interrupt(error)


def test_other_errors_are_no_interrupts():
    with handling():
        try:
            raise ValueError("not a signal's") from Stop()
        except ValueError as error:
            assert interrupt_in(error) is None
            raise_interrupt(error)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.silu(layer(x))
        return x


def train(model, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(torch.randn(128, 96)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (VariableBuilder, "__call__"),  # torch reads the model's code
        (torch._dynamo.utils, "run_node"),  # and runs an operator on fakes
        (StepPlanning, "plan_captured"),
        (OpProfiler, "_try"),
    ],
)
def test_a_call_after_an_interrupted_trace_is_captured(owner, name, monkeypatch):
    torch.compiler.reset()
    model = Net()
    expected = train(model, 0)
    lmswap.enable(model, policy="swap_all", min_swap_bytes=1024)
    own, is_first = getattr(owner, name), [True]

    def interrupt_once(*args, **kwargs):
        if is_first.pop() if is_first else False:
            interrupted()
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupt_once)
    with handling(), pytest.raises(Stop):
        train(model, 0)
    assert not is_first
    assert all(map(torch.equal, train(model, 0), expected))
    report = lmswap.report(model)
    assert report.swapped_out_bytes > 0
    assert not any(note.startswith("path:") for note in report.notes)
    lmswap.disable(model)


def test_settings_made_for_a_call_are_restored_despite_a_signal():
    config = torch._dynamo.config
    before = config.automatic_dynamic_shapes
    with pytest.raises(Stop), tracing_settings():
        config.automatic_dynamic_shapes = not before
        raise Stop
    assert config.automatic_dynamic_shapes == before


# A file of /proc that was just opened as a signal came is closed when it is dropped, and Python says so; what a handler
# raises in a callback of a weak reference, as Dynamo has them, Python only reports.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", ["fx", "eager"])
def test_steps_under_many_signals_fail_or_are_correct_without_retracing(path):
    torch.compiler.reset()
    plain = Net()
    model = lmswap.enable(copy.deepcopy(plain), policy="swap_all", min_swap_bytes=1024, compiler=path)
    for seed in range(6):
        train(model, seed)
    draw, num_traced, num_lost = random.Random(0), counters["frames"]["total"], 0
    with handling():
        for seed in range(150):
            expected = train(plain, seed)
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 0.01))
                    found = train(model, seed)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                num_lost += 1
            else:
                assert all(map(torch.equal, found, expected))
    assert num_lost > 0
    # Torch tries to trace the handler, once; and where a guard is interrupted it traces the model.
    assert counters["frames"]["total"] - num_traced <= 4
    for seed in range(3):
        assert all(map(torch.equal, train(model, seed), train(plain, seed)))
    assert not any(note.startswith("path:") and "requested" not in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


# After these instructions Python 3.11 runs the handlers of signals.
HANDLED_AFTER = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD")}


def interrupt_at(point):
    """Return a trace function that interrupts the given one of the points where handlers run, and the count."""
    previous, counts = {}, [0]

    def trace(frame, event, argument):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            code = frame.f_code.co_code[frame.f_lasti]
            counts[0] += previous.get(frame) in HANDLED_AFTER
            previous[frame] = code
            if counts[0] == point:
                interrupted()
        elif event in ("return", "exception"):  # none runs after a call that raised
            previous.pop(frame, None)
        return trace

    return trace, counts


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", ["fx", "eager"])
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_at_any_point_of_a_step_reaches_the_caller(path, stride):
    torch.compiler.reset()
    plain = Net()
    model = lmswap.enable(copy.deepcopy(plain), policy="swap_all", min_swap_bytes=1024, compiler=path)
    for seed in range(6):
        train(model, seed)
    expected, num_raised, before = train(plain, 0), 0, sys.gettrace()
    for point in itertools.count(1, stride):
        trace, counts = interrupt_at(point)
        with handling():
            sys.settrace(trace)
            try:
                train(model, 0)
            except Stop:
                num_raised += 1
            finally:
                sys.settrace(before)
        if counts[0] < point:
            break
        assert all(map(torch.equal, train(model, 0), expected))
    assert num_raised > 500 / stride
    lmswap.disable(model)
