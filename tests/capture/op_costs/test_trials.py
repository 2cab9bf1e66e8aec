"""Bitwise comparison and synthesis of tensors of every dtype and layout."""

import pytest
import torch

from lmswap.capture.op_costs import trials
from lmswap.capture.op_costs.synthetic_inputs import _fill
from lmswap.capture.op_costs.trials import time_on_cpu


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_floats_are_made_up_as_probabilities(dtype):
    flat = torch.empty(100_000, dtype=dtype)
    _fill(flat)
    values = flat.float()
    assert values.min() >= 0
    assert values.max() <= 1
    assert values.unique().numel() > 3


class _NoMemory:
    def used_tensor_bytes(self):
        return 0

    peak_tensor_bytes = used_tensor_bytes

    def reset_tensor_peak(self):
        pass

    synchronize = trim = reset_tensor_peak


@pytest.mark.parametrize(
    ("seconds", "num_runs", "best"),
    [
        ((0.02, 0.02, 0.01), 2, 0.02),  # nothing was left to warm up
        ((0.02, 0.03, 0.01), 2, 0.02),
        ((0.03, 0.02, 0.01), 3, 0.01),
        ((0.3, 0.2, 0.1), 2, 0.2),  # takes long
    ],
)
def test_an_op_runs_a_third_time_only_where_that_may_show_more(monkeypatch, seconds, num_runs, best):
    now, due = [0.0], list(seconds)
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += due.pop(0)
        return torch.ones(1)

    assert time_on_cpu(run, _NoMemory()).seconds == pytest.approx(best)
    assert len(seconds) - len(due) == num_runs


def test_an_op_that_is_not_timed_runs_once():
    runs = []
    time_on_cpu(lambda: runs.append(1) or torch.ones(1), _NoMemory(), is_timed=False)
    assert runs == [1]
