"""Calls without gradients that each differ, as those of a cache that grows: plain bits, and few traces."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.recompiles import TracesWithoutGradients
from tests.training import session_of
from tests.training_state.adapted import same

WIDTH, VOCABULARY = 32, 100


class Cache:
    """What earlier tokens left, as in transformers: no argument that can be seen from outside."""

    def __init__(self):
        self.states = torch.empty(1, 0, WIDTH)

    def update(self, states):
        self.states = torch.cat([self.states, states], dim=1)
        return self.states


class Generator(nn.Module):
    """A layer of attention to the cache, whose weights are frozen, and a trained head."""

    def __init__(self):
        super().__init__()
        self.embed, self.project = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, cache=None):
        x = self.project(self.embed(tokens))
        states = x if cache is None else cache.update(x)
        return self.head(torch.softmax(x @ states.mT, -1) @ states)


def generate(model, length):
    cache, tokens = Cache(), [torch.tensor([[1, 2, 3]])]
    with torch.no_grad():
        for _ in range(length):
            tokens.append(model(tokens[-1], cache)[:, -1:].argmax(-1))
    return [*tokens, cache.states]


def train(model, batch=4):
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    tokens = torch.arange(batch * 8).view(batch, 8)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return [loss.detach(), model(tokens[:2]), model.head.weight.clone()]


def test_generation_has_plain_bits_and_leaves_training_its_graphs():
    def run(model):
        seen = [*train(model), *generate(model, 12)]
        for _ in range(3):
            seen += train(model)
        return [*seen, *generate(model, 12)]

    torch.manual_seed(0)
    plain = Generator()
    torch.manual_seed(0)
    model = lmswap.enable(Generator(), "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024)
    assert same(run(model), run(plain))
    assert session_of(model).num_captured < 12  # of 24 that differ
    report = str(lmswap.report(model)).replace("\n", " ")
    assert "differ too often to trace each, as in generate()" in report
    assert "path: saved-tensor hooks" not in report
    model(torch.arange(32).view(4, 8)).sum().backward()
    assert lmswap.report(model).swapped_in_bytes >= model.embed.weight.nbytes + model.project.weight.nbytes


def test_inputs_of_few_shapes_are_all_traced():
    traces = TracesWithoutGradients()
    for is_traced in (True, False):
        for shape in range(4):
            assert traces.admits(shape)
            traces.add(shape, is_traced=is_traced)
    assert traces.admits(4)


def test_what_recurs_stays_traced_where_other_calls_never_recur():
    traces = TracesWithoutGradients()
    for is_traced in (True, False):
        traces.add("validation", is_traced=is_traced)
    for length in range(4):
        assert traces.admits(length)
        traces.add(length, is_traced=True)
    assert not traces.admits(4)
    assert traces.admits("validation")
    assert traces.admits(0)


@pytest.mark.parametrize("recurs", [True, False])
def test_traces_without_gradients_are_a_part_of_the_limit(recurs):
    traces = TracesWithoutGradients()
    count = 0
    for length in range(100):
        if traces.admits(length):
            traces.add(length, is_traced=True)
            count += 1
            if recurs:
                traces.add(length, is_traced=False)
    assert count == (16 if recurs else 4)
