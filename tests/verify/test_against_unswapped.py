"""Comparison with the same graphs without swaps: wrong results name their op, unrepeatable ones are excluded."""

import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import ResultDiffers
from lmswap.rewrite import insert
from lmswap.runtime import rng
from lmswap.runtime.engine import SwapEngine
from tests.models import Case
from tests.rewrite.random_planner import plan_at_random
from tests.training import same_bits
from tests.verify.models import MODELS, enable, step

pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


def test_a_use_before_the_wait_for_a_swap_in_is_detected(monkeypatch):
    case = MODELS["shared_views"]

    def wait_at_the_end(editor, swap, anchor):
        flat = editor._incoming[swap.buffer]
        first_use(editor, swap, anchor)
        (done,) = [user for user in flat.users if user.target is insert.ops.swap_in_wait]
        done.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not done)
        editor.graph.output.prepend(done)

    def start_and_wait(engine, *arguments):
        flat = in_start(engine, *arguments)
        while not all(map(engine.native.is_finished, engine._swap_in_of.values())):
            pass
        return flat

    first_use, in_start = insert._SwapInserter._first_use, SwapEngine.in_start
    sound = enable(case, verify=False)
    expected = step(case, sound)
    lmswap.disable(sound)
    monkeypatch.setattr(insert._SwapInserter, "_first_use", wait_at_the_end)
    monkeypatch.setattr(SwapEngine, "in_start", start_and_wait)  # a link so fast that there are no stalls
    model = enable(case, verify=False)
    assert same_bits(step(case, model), expected)
    lmswap.disable(model)
    model = enable(case)
    with pytest.raises(ResultDiffers, match="gradient of"):
        step(case, model)
    lmswap.disable(model)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.dropout(torch.tanh(self.first(x)), 0.5, True).exp())


def test_a_wrong_gradient_names_its_op_line_and_recomputed_tensors(monkeypatch):
    case = Case(Dropped, lambda: torch.randn(64, 64))
    planner = plan_at_random(0, share=1.0)
    monkeypatch.setattr("lmswap.session.planner.make_plan", planner)
    unseeded = lambda state, device, op, /, *a, **k: op(*a, **k)  # noqa: E731
    monkeypatch.setattr(rng.recompute_random, "__code__", unseeded.__code__)
    model = enable(case)
    with pytest.raises(ResultDiffers) as caught:
        for _ in range(3):
            step(case, model)
    error = caught.value
    assert error.result in ("the gradient of first.weight", "the gradient of second.weight")
    assert "aten.mm" in error.made_by
    assert "test_against_unswapped.py:" in error.made_by
    assert "self.second(torch.dropout(" in error.made_by
    assert 0 < error.num_differing <= error.num_elements == 64 * 64
    assert error.step == 1
    assert error.moved
    assert "without" in str(error)
    lmswap.disable(model)


@torch.library.custom_op("lmswap_test::shaky", mutates_args=())
def shaky(x: torch.Tensor) -> torch.Tensor:
    return x + next(NOISE)


shaky.register_fake(torch.empty_like)
shaky.register_autograd(lambda context, gradient: gradient)
NOISE = itertools.count()


class Shaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return shaky(h.exp()), h.sin().cos()


@pytest.mark.parametrize("steady", [0, 15])
def test_results_that_torch_does_not_repeat_are_excluded_and_listed(monkeypatch, steady):
    monkeypatch.setattr(f"{__name__}.NOISE", itertools.chain([0] * steady, itertools.count()))
    case = Case(Shaky, lambda: torch.randn(64, 64))
    model = enable(case)
    for _ in range(12):
        step(case, model)
    verified = lmswap.report(model).verified
    assert verified.num_differences == 0
    assert verified.unrepeatable == [
        "output 0, made by op 'shaky' (lmswap_test.shaky.default)",
        "output 0 of plain torch",
    ]
    assert "not compared" in " ".join(str(lmswap.report(model)).split())
    assert verified.num_outputs in range(12, 24)
    lmswap.disable(model)


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return shaky(torch.tanh(self.linear(x)).exp())


def test_a_difference_by_nan_mentions_reads_of_uninitialized_memory(monkeypatch):
    monkeypatch.setattr(f"{__name__}.NOISE", itertools.repeat(0.0))
    model = enable(Case(Uninitialized, lambda: torch.randn(64, 64)))
    model(torch.randn(64, 64))
    found = itertools.chain([0.0, float("nan")], itertools.repeat(0.0))  # what memory holds without swaps, with, later
    monkeypatch.setattr(f"{__name__}.NOISE", found)
    with pytest.raises(ResultDiffers, match="holds NaN, and then these are not lmswap's bytes"):
        model(torch.randn(64, 64))
    lmswap.disable(model)
