"""Benchmarks of ops: as eager torch runs them, also during a trace; synthetic inputs that fail are tried once."""

import logging

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop

from lmswap.analyze.cost import unit
from lmswap.capture.op_costs import benchmark
from lmswap.capture.op_costs.benchmark import OpProfiler
from tests.capture.captured import NoMemory, Recording, capture
from tests.models import CASES, Case


def metered(monkeypatch, case: Case, *, times: int = 1) -> list[Recording]:
    """Captures a model repeatedly with a meter that knows no op yet."""
    meter = OpProfiler(torch.device("cpu"), NoMemory(), unit)
    monkeypatch.setattr(Recording, "output_metadata", meter.output_metadata)
    recordings = [capture(case.make(), case.batch())[0] for _ in range(times)]
    for recording in recordings:
        for lowered in recording.lowered:
            meter.costs(lowered.program, lowered.graphs)
    return recordings


class Remembering(NoMemory):
    """A process that keeps 3 bytes of each op that is like none before."""

    def __init__(self) -> None:
        self.kernels = set()

    def other_bytes(self):
        return 3 * len(self.kernels)


@pytest.mark.parametrize("layer", [nn.Tanh, nn.Sigmoid])
def test_costs_have_what_the_first_runs_of_ops_leave(layer, monkeypatch):
    meter = OpProfiler(torch.device("cpu"), memory := Remembering(), unit)
    monkeypatch.setattr(
        meter, "_run", lambda node, run=meter._run, **how: (memory.kernels.add(node.target), run(node, **how))[1]
    )
    with torch.no_grad():
        recording, _ = capture(nn.Sequential(layer(), nn.Tanh(), nn.Tanh()), torch.rand(4, 5))
    (lowered,) = recording.lowered
    kept = [meter.costs(lowered.program, lowered.graphs).first_run_bytes for _ in range(2)]
    assert kept == [3 * len({layer, nn.Tanh}), 0]


@pytest.mark.parametrize("name", CASES)
def test_every_op_of_a_model_is_timed_and_none_is_only_estimated(name, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lmswap.capture.op_costs.benchmark")
    (recording,) = metered(monkeypatch, CASES[name])
    assert recording.lowered
    assert not caplog.messages


def test_ops_whose_seconds_are_known_run_once_until_these_are_needed(monkeypatch):
    case, runs, run = CASES["resnet"], [], benchmark.time_on_cpu

    def count(*given, is_timed):
        runs.append(is_timed)
        return run(*given, is_timed=is_timed)

    monkeypatch.setattr(benchmark, "time_on_cpu", count)
    meter = OpProfiler(torch.device("cpu"), NoMemory(), unit)
    (lowered,) = capture(case.make(), case.batch())[0].lowered
    known = meter.costs(lowered.program, lowered.graphs, [float(op.index) for op in lowered.program.ops])
    assert known.seconds == tuple(map(float, range(len(lowered.program.ops))))
    num_distinct = len(runs)
    assert not any(runs)
    timed = meter.costs(lowered.program, lowered.graphs)
    assert runs[num_distinct:] == [True] * num_distinct
    assert timed.scratch_bytes == known.scratch_bytes
    meter.costs(lowered.program, lowered.graphs, known.seconds)
    assert len(runs) == 2 * num_distinct


PROBABILITIES = {
    "binary_cross_entropy": lambda x: nn.functional.binary_cross_entropy(x, x.detach()),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach()),
    "multinomial": lambda x: x * torch.multinomial(x.detach(), 2).sum(),
    "assert": lambda x: (torch._assert_async((x >= 0).all()), x * 2)[1],
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_ops_that_take_probabilities_only_or_assert_are_timed_too(name, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lmswap.capture.op_costs.benchmark")
    case = Case(lambda: lambda x: PROBABILITIES[name](x.sigmoid()), lambda: torch.rand(4, 5, requires_grad=True))
    metered(monkeypatch, case)
    assert not caplog.messages


@pytest.fixture
def refusals():
    """How often an operator was run on inputs that it refuses."""
    refused: list[torch.Tensor] = []

    def kernel(x):
        if (x < 1).any():
            refused.append(x.sum())
            raise ValueError("only large numbers")
        return x.sqrt()

    library = torch.library.Library("lmswap_choosy", "DEF")
    library.define("root(Tensor x) -> Tensor")
    library.impl("root", kernel, "CPU")
    torch.library.register_fake("lmswap_choosy::root", torch.empty_like, lib=library)
    yield refused
    library._destroy()


class Choosy(nn.Module):
    def forward(self, x):
        return torch.ops.lmswap_choosy.root(x + 1)


def test_an_op_that_refuses_made_up_inputs_is_run_on_them_once(refusals, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lmswap.capture.op_costs.benchmark")
    metered(monkeypatch, Case(Choosy, lambda: torch.rand(4, 5)), times=2)
    assert len(refusals) == 1
    assert "only large numbers" in caplog.text


@pytest.fixture
def runs():
    """How often each of two operators ran."""
    counts = {"first": 0, "second": 0}
    library = torch.library.Library("lmswap_counted", "DEF")

    def counted(name):
        def kernel(x):
            counts[name] += 1
            return x * 2

        return kernel

    for name in counts:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, counted(name), "CPU")
        torch.library.register_fake(f"lmswap_counted::{name}", torch.empty_like, lib=library)
    yield counts
    library._destroy()


class Branching(nn.Module):
    def forward(self, x):
        ops, never = torch.ops.lmswap_counted, x.sum() < 0
        return sum(torch.cond(never, op, torch.neg, (x,)) for op in (ops.first, ops.second))


def test_ops_that_run_graphs_are_timed_by_graph(runs, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lmswap.capture.op_costs.benchmark")
    with torch.no_grad():
        metered(monkeypatch, Case(Branching, lambda: torch.rand(4, 5)))
    assert not caplog.messages
    assert all(runs.values()), runs


class Looping(nn.Module):
    def forward(self, x):
        return while_loop(lambda x: (x != x.round()).any(), lambda x: (x + 1,), (x,))


@pytest.mark.timeout(60)
def test_loops_that_made_up_values_may_never_end_are_not_tried(monkeypatch):
    with torch.no_grad():
        (recording,) = metered(monkeypatch, Case(Looping, lambda: torch.ones(4, 5)))
    assert any(op.target == "while_loop" for lowered in recording.lowered for op in lowered.program.ops)


def test_progress_counts_the_ops_that_are_timed_once_for_all_like_them(monkeypatch):
    reported = []
    monkeypatch.setattr(benchmark, "set_progress", lambda *of: reported.append(of))
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())])
    case = Case(lambda: model, lambda: torch.rand(4, 8, requires_grad=True))
    (recording,) = metered(monkeypatch, case)
    total = len(reported)
    assert 0 < total < sum(not op.is_view for op in recording.lowered[0].program.ops)
    assert [count for count, _, _ in reported] == list(range(1, total + 1))
    assert {of for _, of, _ in reported} == {total}
    shares = [share for _, _, share in reported]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
