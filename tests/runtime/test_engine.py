"""The engine's record of transfers in flight, with concurrent users: steps of one model in two threads may overlap."""

import time

import pytest
import torch
from torch import nn

import lmswap
from tests.training import session_of


class SweptMeanwhile:
    """The native engine, at whose calls another thread sweeps as soon as the copy has ended."""

    def __init__(self, engine):
        self._native, self._engine, self.num_sweeps = engine.native, engine, 0

    def __getattr__(self, name):
        call = getattr(self._native, name)
        return self._swept(call) if name in ("out_start", "in_start") else call

    def _swept(self, call):
        def run(*arguments):
            result = call(*arguments)
            while not self._native.is_idle():
                time.sleep(0.001)
            self._engine.reap_finished_transfers()
            self.num_sweeps += 1
            return result

        return run


@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_a_copy_that_finishes_before_it_has_a_number_is_no_error(compiler):
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(256, 512), nn.Sigmoid(), nn.Linear(512, 256)), torch.randn(1024, 256)
    model(data).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    lmswap.enable(model, policy="swap_all", compiler=compiler)
    for _ in range(2):
        model.zero_grad()
        model(data).square().mean().backward()
    engine = session_of(model).engine
    native, engine.native = engine.native, SweptMeanwhile(engine)
    model.zero_grad()
    model(data).square().mean().backward()
    swept, engine.native = engine.native, native
    assert swept.num_sweeps >= 2
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))
    lmswap.disable(model)
