"""Kineto's record on a CUDA device compared with the engine's own of the same steps; skipped without a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import lmswap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.real_gpu("Kineto sees a device by CUPTI, which is not emulated"),
]


def profiled(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(6))).cuda()
    lmswap.enable(model, budget="4GiB", policy="swap_all", **options)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(16, 16, 256, 256, device="cuda")

    def train(steps):
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(5)
    with lmswap.profile() as profile:
        train(3)
    lmswap.disable(model)
    return profile


def test_kineto_and_the_engine_record_the_same_copies():
    profile = profiled()
    assert [trace.tool for trace in profile.traces] == ["Kineto", "lmswap's record"]
    seen, own = profile.figures
    assert (seen.num_steps, own.num_steps) == (3, 3)
    for way in ("copies_in", "copies_out"):
        assert getattr(seen, way).nbytes == getattr(own, way).nbytes > 0
        assert getattr(seen, way).num_copies == 2 * getattr(own, way).num_copies > 0  # of 64 MiB, in pieces of 32
        assert getattr(seen, way).bytes_per_second == pytest.approx(getattr(own, way).bytes_per_second, rel=0.2)
    assert profile.is_valid
    assert 0 < seen.utilization <= 1
    assert seen.window_seconds == pytest.approx(own.window_seconds, rel=0.1)


def test_an_emulated_link_shows_in_the_tools_column_as_lmswap_paced_it():
    profile = profiled(link="2GB/s")
    seen, own = profile.figures
    assert "Link EMULATED: 2 GB/s out, 2 GB/s in" in str(profile)
    rates = [figures.copies_out.window_bytes_per_second for figures in (seen, own)]  # each has its own window
    assert rates[0] == pytest.approx(rates[1], rel=0.01)
    assert replace(seen.copies_out, window_bytes_per_second=rates[1]) == own.copies_out
    assert seen.copies_out.bytes_per_second < 2.1e9
    assert seen.compute_seconds != own.compute_seconds


def test_batches_from_pageable_memory_are_no_valid_measurement():
    with lmswap.profile() as profile:
        parameter = nn.Parameter(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(2):
            (parameter * torch.ones(2**20, device="cpu").cuda()).sum().backward()
            optimizer.step()
    assert not profile.is_valid
    assert profile.figures[0].num_pageable == 2
    assert "NOT A VALID MEASUREMENT" in str(profile)
