"""Weights larger than the GPU; skipped where there is none."""

import gc

import pytest
import torch

import lmswap
from lmswap.errors import OptionError
from tests.gpu.trainings import begin
from tests.training import session_of
from tests.training_state.adapted import network, same, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]
MIB = 2**20


def on_host(**size):
    """The network in host memory; its random numbers are the CPU's."""
    with torch.device("cpu"):
        return network(**size)


def plain(steps, **size):
    """What plain torch computes, in host memory."""
    found = on_cpu(train(on_host(**size).cuda(), steps))
    begin()
    return found


def on_cpu(values):
    return [value.detach().cpu() for value in values]


def test_a_frozen_base_that_does_not_fit_is_swapped_without_an_argument():
    expected = plain(4)
    keeping = lmswap.enable(on_host().cuda(), "2GiB", min_swap_bytes="256KiB", weights="keep")
    train(keeping, 1)
    budget_bytes = lmswap.least_budget(keeping) - 10 * MIB  # what a process holds before the step differs
    lmswap.disable(keeping)
    del keeping
    gc.collect()
    torch.cuda.empty_cache()
    model = lmswap.enable(on_host().cuda(), budget_bytes, min_swap_bytes="256KiB")
    found = train(model, 4)
    report = lmswap.report(model)
    assert same(on_cpu(found), expected)
    assert report.swapped_in_bytes > 4 * MIB
    assert report.measured_peak_bytes <= report.budget_bytes
    assert session_of(model).engine.arena.num_unplaced == 0
    assert "plans place them, too" in str(report).replace("\n", " ")


@pytest.mark.slow
def test_a_model_larger_than_the_card_is_never_on_it():
    size, budget_bytes = {"layers": 100}, 128 * MIB
    expected = plain(4, **size)
    model = on_host(**size)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 3 * budget_bytes
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(1.02 * budget_bytes / torch.cuda.mem_get_info()[1])
    try:
        lmswap.enable(model, budget_bytes, device="cuda", min_swap_bytes="64KiB")
        assert all(parameter.is_cuda for parameter in model.parameters())
        found = on_cpu(train(model, 4))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert same(found, expected)
    assert torch.cuda.max_memory_reserved() <= 1.02 * budget_bytes
    assert lmswap.report(model).measured_peak_bytes <= budget_bytes
    lmswap.disable(model)
    assert same(on_cpu(model.parameters()), expected[-len([*model.parameters()]) :])


def test_where_a_model_cannot_go_is_refused():
    with pytest.raises(OptionError, match="swaps weights, which needs"):
        lmswap.enable(on_host(), device="cuda", weights="keep")
    with pytest.raises(OptionError, match="from 'cpu' to a GPU it can"):
        lmswap.enable(on_host().cuda(), device="cpu")
