"""A disk that fails: before training it is an error at once, in mid-step an error after which the process trains on."""

import functools
import gc

import pytest
import torch

import lmswap
from lmswap.errors import TierError, TransferError
from lmswap.execute import _C
from lmswap.hardware.measure import describe_machine
from tests.models import CASES

CASE = CASES["resnet"]


def enable_on_a_disk_that(monkeypatch, faults: str):
    describe_machine(torch.device("cpu"), "disk")  # measured, if no test has yet, while the disk is sound
    monkeypatch.setattr("lmswap.session._C.Engine", functools.partial(_C.Engine, faults=faults))
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(CASE.make(), policy="swap_all", min_swap_bytes=4096)


def step(model) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = CASE.loss(model(CASE.batch()))
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def test_a_full_disk_is_an_error_before_any_op_runs(monkeypatch):
    model = enable_on_a_disk_that(monkeypatch, "reserve@*=fail")
    with pytest.raises(TierError, match="No space left"):
        step(model)
    lmswap.disable(model)
    step(model)


@pytest.mark.parametrize("faults", ["write@2=fail", "read@2=fail"])
def test_a_failing_copy_loses_the_step_and_nothing_else(monkeypatch, faults):
    model = enable_on_a_disk_that(monkeypatch, faults)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TransferError, match="Input/output error"):
        step(model)
    model.load_state_dict(state)  # batch statistics had moved already
    survived = step(model)
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)
    sound = enable_on_a_disk_that(monkeypatch, "")
    assert all(torch.equal(a, b) for a, b in zip(survived, step(sound), strict=True))
    lmswap.disable(sound)


@pytest.mark.parametrize("faults", ["write@*=short", "read@*=short", "write@*=jitter:0.02,read@*=jitter:0.02"])
def test_a_disk_that_is_slow_or_does_half_is_only_slow(monkeypatch, faults):
    results = []
    for given in ("", faults):
        model = enable_on_a_disk_that(monkeypatch, given)
        results.append(step(model) + step(model))
        lmswap.disable(model)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
