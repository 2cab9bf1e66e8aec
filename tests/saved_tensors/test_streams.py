"""Memory is reused when the streams have passed that its own step saves on; streams are stand-ins, by numbers."""

from contextlib import contextmanager

import torch
from torch import nn

import lmswap

SECOND = 7


class FakeStreams:
    """The streams of a model as `Streams`, which records what `delay_reuse` waits for."""

    def __init__(self):
        self.now, self.are_multiple, self.delayed = 0, False, []

    def current(self):
        return self.now

    @contextmanager
    def at(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def wait_for(self, stream):
        pass

    def delay_reuse(self, tensor, streams):
        self.delayed.append({*streams})

    def refuse_graph_capture(self, model):
        pass


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.streams = [0]

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with self.at(self.streams[number * len(self.streams) // len(self.layers)]):
                x = torch.tanh(layer(x))
        return x


def test_a_step_on_two_streams_delays_reuse_in_no_later_step():
    options = {"policy": "swap_all", "compiler": "eager", "min_swap_bytes": 4096}
    model = lmswap.enable(Layers(), budget="4GiB", **options)
    engine, x = lmswap.api._sessions[model].engine, torch.randn(64, 64)
    engine.streams = FakeStreams()
    model.at = engine.streams.at

    def waited_for(*streams):
        model.streams = streams
        engine.streams.delayed.clear()
        model(x).sum().backward()
        return set().union(*engine.streams.delayed)

    waited_for(0)
    assert waited_for(0) == {0}
    assert waited_for(0, SECOND) == {0, SECOND}
    assert engine.streams.are_multiple
    assert waited_for(0) == {0}
    lmswap.disable(model)
