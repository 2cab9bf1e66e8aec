"""Ops that are not bitwise repeatable are found by experiment, and are not what plans assume."""

from functools import partial

import pytest
import torch

from benchmarks.first_hour import repeats as repeats_module
from benchmarks.unet3d.network import UNet3d
from lmswap.capture import lower

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.slow
def test_repeatable_convolutions_are_not_counted_under_cudnn_benchmark(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # so that it is put back
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # some kernels of small ones do not repeat theirs
    monkeypatch.setattr(lower, "_chooses_by_thread", lambda node: node.op == "call_function")
    monkeypatch.setattr(repeats_module, "UNet3d", partial(UNet3d, base_filters=2))
    found = repeats_module.repeats(32)
    assert found["default"]["ops"] > 100
    assert found["default"]["not_repeated"] == {}
