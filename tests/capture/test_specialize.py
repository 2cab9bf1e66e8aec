"""torch.compile(model, backend="lmswap") where inputs come in several sizes: torch leaves them open, a plan cannot."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import lmswap


class Pixels(nn.Module):
    """Computes with the sizes of its input, and gives two of them back."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear, self.place = nn.Linear(8, 8), nn.Embedding(40, 8)

    def forward(self, x, num=None, scale=1.0):
        y = torch.tanh(self.norm(self.convolution(x))).reshape(x.shape[0], 8, -1).transpose(1, 2)
        y = torch.tanh(self.linear(y + self.place(torch.arange(y.shape[1]) % 40)))
        return nn.functional.dropout(y, 0.1, self.training)[:, :num] * scale, x.shape[0], 2 * y.shape[1]


class Lists(nn.Module):
    """Takes a list, and has a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, *rows):
        joined = torch.cat([torch.tanh(self.first(row)).exp() for row in rows])
        torch._dynamo.graph_break()
        return torch.tanh(self.second(joined)).exp() / joined.shape[0], rows[0]


def images(*sizes: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.randn(batch, 3, side, side),) for batch, side in sizes]


def rows(*sizes: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(size, 64) for size in sizes)


def results(model: nn.Module, call, batches: Iterable[tuple[object, ...]]) -> list[object]:
    torch.manual_seed(1)
    found: list[object] = []
    for batch in batches:
        model.zero_grad()
        outputs = call(*batch)
        loss = outputs[0].square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters()), *outputs[1:]]
    return found


@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        (Pixels, images((4, 16), (4, 16), (3, 16), (1, 16), (4, 16), (4, 20), (2, 24), (2, 20))),
        pytest.param(
            Pixels,
            [(torch.randn(4, 3, 16, 16), num) for num in (200, 200, 150, 151, 200)],
            marks=pytest.mark.slow,
        ),
        (Pixels, [(torch.randn(batch, 3, 16, 16), 99, 1 / batch) for batch in (4, 3, 4, 2)]),
        (
            Lists,
            [tuple(torch.randn(n, 64) for n in sizes) for sizes in ((64,), (65,), (40, 50), (50, 40), (66,), (65,))],
        ),
    ],
    ids=["sizes", "whole numbers", "other numbers", "lists"],
)
def test_each_size_gets_a_plan_and_the_bits_of_plain_torch(kind, batches):
    torch.manual_seed(0)
    plain = kind()
    expected = results(plain, plain, batches)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = kind()
    compiled = torch.compile(model, backend="lmswap", options={"policy": "swap_all", "min_swap_bytes": 4096})
    for actual, wanted in zip(results(model, compiled, batches), expected, strict=True):
        assert torch.equal(actual, wanted) if isinstance(wanted, torch.Tensor) else actual == wanted
    assert lmswap.report(compiled).swapped_out_bytes > 0
    lmswap.disable(compiled)


@pytest.mark.parametrize(("policy", "expected"), [("auto", [2, 2, 2]), ("swap_all", [4, 4, 4])])
def test_a_size_that_is_seen_again_is_not_captured_again(policy, expected):
    torch.compiler.reset()
    options = {"budget": "4GiB", "policy": policy, "min_swap_bytes": 1024}
    compiled = torch.compile(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), backend="lmswap", options=options
    )
    numbers = []
    for _ in range(3):
        for size in (8, 9, 10, 11):
            compiled(torch.randn(size, 64)).sum().backward()
        numbers.append(len(lmswap.api._session(compiled).graphs))
    # Where tensors move, 10 and 11 are in buckets of their own.
    assert numbers == expected
    lmswap.disable(compiled)


class Adds(nn.Module):
    """Writes into its input."""

    def forward(self, x, y):
        x.add_(1)
        return (x * y).sum()


def test_arguments_that_share_memory_are_distinguished_from_separate_ones():
    def sums(call) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found = []
        for size, is_shared in ((11, False), (12, False), (12, True), (12, False), (12, True)):
            first, second = torch.randn(40), torch.randn(40)
            found.append(call(first[:size], (first if is_shared else second)[4 : 4 + size]))
        return found

    torch.compiler.reset()
    compiled = torch.compile(Adds(), backend="lmswap", options={"budget": "4GiB"})
    assert all(map(torch.equal, sums(compiled), sums(Adds())))
    lmswap.disable(compiled)
