"""Bitwise comparison and synthesis of tensors of every dtype and layout."""

import pytest
import torch

from lmswap.capture.op_costs import trials
from lmswap.capture.op_costs.synthetic_inputs import _fill
from lmswap.capture.op_costs.trials import bitwise_equal, time_on_cpu

TENSORS = {
    "scalar": torch.tensor(1.0),
    "empty": torch.empty(0),
    "bool": torch.ones(3, dtype=torch.bool),
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "conjugate": torch.ones(2, 2, dtype=torch.complex64).conj(),
    "float8": torch.ones(8).to(torch.float8_e4m3fn),
    "channels_last": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with_gaps": torch.ones(4, 6)[:, ::2],
    "expanded": torch.ones(3).expand(4, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_equal_bits_are_seen_in_any_layout(name):
    tensor = TENSORS[name]
    assert bitwise_equal(tensor, tensor.clone(memory_format=torch.preserve_format))


def test_bits_count_not_values():
    assert bitwise_equal(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    one, other = torch.zeros(2**23), torch.zeros(2**23)
    other[-1] = 1e-45  # in another piece than the first
    assert not bitwise_equal(one, other)


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
