"""Pinned memory is taken when a step is planned, once, and by what is missing; never for each tensor."""

import logging
import re

import pytest
import torch

import lmswap
from lmswap.errors import TierError
from lmswap.hardware import measure
from lmswap.hardware.host_memory import HostMemory
from lmswap.runtime import _C
from tests.models import CASES

CASE = CASES["shared_views"]
MIB = 2**20


def enabled(policy="swap_all", **options):
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(CASE.make().cuda(), policy=policy, min_swap_bytes=4096, **options)


def train(model, steps):
    for _ in range(steps):
        CASE.loss(tuple(output.cuda() for output in model(CASE.batch().cuda()))).backward()


def test_a_plans_memory_is_reserved_before_its_step_and_reported(caplog):
    model = enabled(compiler="fx")
    with caplog.at_level(logging.INFO, "lmswap"):
        train(model, 1)
    messages = [record.getMessage() for record in caplog.records]
    reserved = next(i for i, text in enumerate(messages) if text.startswith("reserved the host tier in"))
    planned = next(i for i, text in enumerate(messages) if text.startswith("planned the step"))
    assert reserved < planned
    stats = lmswap.api._sessions[model].engine.native.tier_stats("host")
    [nbytes] = lmswap.api._sessions[model].plans.newest().plan.tier_bytes.values()
    assert stats.capacity_bytes == nbytes
    assert re.search(r"The host tier has .*, reserved in", str(lmswap.report(model)))
    lmswap.disable(model)


def test_a_step_without_a_plan_pins_once(emulated_gpu):
    model = enabled(compiler="eager")
    native = lmswap.api._sessions[model].engine.native
    train(model, 1)
    stats = native.tier_stats("host")
    assert stats.peak_used_bytes > 0
    assert stats.capacity_bytes == 256 * MIB
    train(model, 3)
    assert native.tier_stats("host")[0::3] == stats[0::3]  # neither more memory nor time
    lmswap.disable(model)


def test_a_second_reservation_pins_what_is_missing_and_keeps_the_bytes(emulated_gpu):
    source = torch.arange(2 * MIB, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    engine = _C.Engine(driver="cuda", device=0)
    engine.open_host_tier(64 * MIB)
    engine.reserve("host", 8 * MIB)
    stream = torch.cuda.current_stream().cuda_stream
    tokens = []
    for nbytes, offset in ((8 * MIB, 0), (8 * MIB, 8 * MIB)):
        if offset:
            engine.reserve("host", offset + nbytes)
        capsule = engine.out_start(1, "host", offset, source.data_ptr(), nbytes, stream)
        tokens.append(torch.utils.dlpack.from_dlpack(capsule))
        engine.out_done(int(tokens[-1]), stream)
    for token in tokens:
        target.zero_()
        engine.in_done(int(token), engine.in_start(1, int(token), target.data_ptr(), 8 * MIB, stream), stream)
        assert torch.equal(source, target)
    assert engine.tier_stats("host").capacity_bytes == 16 * MIB
    tokens.clear()
    across = torch.utils.dlpack.from_dlpack(engine.out_start(1, "host", 4 * MIB, source.data_ptr(), 8 * MIB, stream))
    engine.out_done(int(across), stream)
    target.zero_()
    engine.in_done(int(across), engine.in_start(1, int(across), target.data_ptr(), 8 * MIB, stream), stream)
    assert torch.equal(source, target)
    assert emulated_gpu.take_violations() == []
    engine.close()


@pytest.mark.parametrize("host_budget", [None, "64KiB"])
def test_a_tier_too_small_when_shared_is_reported(host_budget, monkeypatch):
    monkeypatch.setattr(measure, "read_host_memory", lambda: HostMemory(2**30, 2**20))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    model = enabled(compiler="fx", host_budget=host_budget)
    with pytest.raises(TierError, match="would hold") as raised:
        train(model, 1)
    assert ("8 processes of this machine" in str(raised.value)) == (host_budget is None)
    lmswap.disable(model)
