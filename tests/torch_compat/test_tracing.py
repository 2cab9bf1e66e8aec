"""Nothing is heard of a trace that failed and was discarded; warnings of the model's own code are."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import lmswap


class Masked(nn.Module):
    """Overwrites what a mask picks: the gradient's size depends on values, which no trace has."""

    def __init__(self, write):
        super().__init__()
        self.write, self.layer = write, nn.Linear(8, 8)

    def forward(self, x):
        h = self.layer(x)
        return self.write(h.clone(), h, torch.rand(x.shape) < 0.5).sin()


def assign(out, h, mask):
    out[mask] = h[mask].exp()
    return out


def put(out, h, mask):
    return out.index_put((mask,), h.mean())


def put_two(out, h, mask):
    """Two such writes, one after the other."""
    return put(put(out, h, mask), h.square(), ~mask)


def train(model):
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward()
        losses += [loss.detach(), model.layer.weight.grad]
    return losses


@pytest.mark.parametrize("write", [assign, put, put_two])
@pytest.mark.parametrize("is_watched", [False, True])
def test_no_warning_escapes_from_a_trace_that_was_discarded(write, is_watched):
    torch.compiler.reset()
    torch.manual_seed(0)
    expected = train(Masked(write))
    torch.manual_seed(0)
    with torch.autograd.set_detect_anomaly(is_watched):
        model = lmswap.enable(Masked(write), "2GiB", policy="swap_all", min_swap_bytes=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # as errors they would only end the trace
            assert all(map(torch.equal, train(model), expected))
    assert not caught
    lmswap.disable(model)


def test_anomaly_mode_names_the_op_whose_backward_makes_nan():
    torch.compiler.reset()
    model = lmswap.enable(nn.Linear(8, 8), "2GiB", policy="swap_all", min_swap_bytes=1)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="returned nan"),
    ):
        (model(torch.ones(8)) * float("nan")).sum().backward()
    lmswap.disable(model)


def test_shape_assumptions_of_a_trace_are_dropped_with_it():
    torch.compiler.reset()
    model = lmswap.enable(nn.Sequential(nn.Conv1d(2, 4, 3), nn.GELU()), "2GiB")
    for length in (8, 9):
        output = model(torch.randn(2, 2, length))
        assert len(FakeTensorMode.cache) == 0
        output.sum().backward()
    lmswap.disable(model)


FIRST_CALL = """
import sys, torch, lmswap
from pathlib import Path
model = lmswap.enable(torch.nn.Linear(3, 3), "1GiB")
there = {*sys.modules}
model(torch.ones(2, 3))
print(sum(Path(new.__file__).stat().st_size for name, new in [*sys.modules.items()] if name not in there))
"""


def test_a_first_call_imports_little_code_as_that_would_be_growth_of_the_model():
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 2**20
