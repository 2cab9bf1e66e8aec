"""A step that moves nothing takes little longer than without lmswap: counted in instructions of Python."""

import copy
import gc
from types import SimpleNamespace

import torch
from torch import nn

import lmswap
from lmswap import dispatch
from lmswap.capture import aot
from lmswap.runtime import own_time
from lmswap.session import compiled_graph, graph_capture
from lmswap.session.planner import Planner
from lmswap.session.session import Session
from tests.instructions import counted_instructions

# Beside torch's own, that of `torch.compile` with the backend "aot_eager"; for a few more parameters some more.
_MAX_INSTRUCTIONS = 2_700
_MAX_INSTRUCTIONS_OF_ARGUMENTS = 200


def test_a_step_without_swaps_executes_few_instructions_more_than_torch():
    gc.collect()  # models of other tests: each has an observer of the memory's peak, which a step goes through
    gc.collect()  # what finalizers have kept
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    traced = torch.compile(copy.deepcopy(model), backend="aot_eager", dynamic=False)
    lmswap.enable(model, "2GiB")
    x = torch.randn(32, 64)

    def instructions_of(call):
        for _ in range(8):
            call(x).sum().backward()
        counted = []
        for _ in range(5):
            with counted_instructions("") as counts:
                call(x).sum().backward()
            counted += counts
        return min(counted)

    assert instructions_of(model) < instructions_of(traced) + _MAX_INSTRUCTIONS
    assert not lmswap.report(model).swapped_out_bytes
    lmswap.disable(model)


def test_arguments_that_are_not_needed_cost_nothing():
    """Weights and optimizer state that may leave, but fit."""

    def instructions_of(**options):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        given = {"weights": "swap", "optimizer": optimizer} if options else {}
        lmswap.enable(model, "2GiB", min_swap_bytes=4096, **given)
        x = torch.randn(32, 1024)

        def step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(10):
            step()
        counted = []
        for _ in range(5):
            with counted_instructions("") as counts:
                step()
            counted += counts
        lmswap.disable(model)
        return min(counted)

    assert instructions_of(given=True) < instructions_of() + _MAX_INSTRUCTIONS_OF_ARGUMENTS


def test_the_time_in_lmswaps_code_is_reported_without_planning_and_the_models_ops(monkeypatch):
    torch.compiler.reset()
    clock = SimpleNamespace(seconds=1.0, perf_counter=lambda: clock.seconds)
    compile_boxed, prepare, price, priced = compiled_graph.compile_boxed, Session.prepare, Planner.priced, []

    def compile_to_long_ops(module):
        function = compile_boxed(module)

        def run(arguments):
            clock.seconds += 1000.0
            return function(arguments)

        return run

    def prepare_long(*given):
        clock.seconds += 5.0  # before the step before is ended
        prepare(*given)
        clock.seconds += 7.0

    def price_long(*given):
        priced.append(clock.seconds)
        clock.seconds += 10_000.0
        return price(*given)

    for module in (own_time, compiled_graph, graph_capture, dispatch, aot):
        monkeypatch.setattr(module, "perf_counter", clock.perf_counter)
    monkeypatch.setattr(compiled_graph, "compile_boxed", compile_to_long_ops)
    monkeypatch.setattr(Session, "prepare", prepare_long)
    monkeypatch.setattr(Planner, "priced", price_long)
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), "2GiB")
    found = []
    for _ in range(6):
        model(torch.randn(32, 64)).sum().backward()
        found.append(lmswap.report(model).own_seconds)
    assert found == [12.0] * 6
    assert priced
    assert "lmswap's own time was 12.0 s" in " ".join(str(lmswap.report(model)).split())
    lmswap.disable(model)
