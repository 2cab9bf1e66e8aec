"""Random models that write what autograd has saved: with and without version counters, at once and later.

A model is a list of instructions over numbered tensors. Some outlive the forward, and are written between it and the
backward; the backward of `Scribbling` writes what it is given.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

ROWS, COLUMNS = 16, 32


class Scribbling(torch.autograd.Function):
    """Writes its saved tensor after it was saved, and again in each backward."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        with torch.no_grad():
            y.data.mul_(1.5)
        return y * 2

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        y.data.add_(0.25)
        return grad * y


def write(tensor, how):
    """Writes ``tensor`` by one of `WAYS`."""
    if how == "in place":
        tensor.mul_(0.5)
    elif how == "no_grad":
        with torch.no_grad():
            tensor.mul_(0.5)
    elif how == ".data":
        tensor.data.mul_(0.5)
    elif how == "detach":
        tensor.detach().mul_(0.5)
    elif how == "numpy":
        array = tensor.detach().numpy()
        array *= 0.5
    elif how == "piece":
        tensor.data[:, 1::2] += 1.0
    elif how == "grown":
        storage = tensor.untyped_storage()
        tensor.data.mul_(0.5)
        storage.resize_(storage.nbytes() + 4096)
    elif how == "a look":
        saved = getattr(tensor.grad_fn, "_saved_result", None)
        if saved is not None:
            saved.data.mul_(0.5)


WAYS = ("in place", "no_grad", ".data", "detach", "numpy", "piece", "grown", "a look")
_UNARY = {"sin": torch.sin, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": lambda x: torch.exp(-x.abs())}
_AT = st.integers(0, 7)

instructions = st.lists(
    st.one_of(
        st.tuples(st.just("unary"), st.sampled_from(sorted(_UNARY)), _AT),
        st.tuples(st.just("multiply"), _AT, _AT),
        st.tuples(st.just("chunks"), _AT, st.booleans()),
        st.tuples(st.just("rrelu"), _AT),
        st.tuples(st.just("dropout"), _AT),
        st.tuples(st.just("scribble"), _AT),
        st.tuples(st.just("view"), _AT),
        st.tuples(st.just("write"), _AT, st.sampled_from(WAYS)),
        st.tuples(st.just("drop"), _AT),
        st.tuples(st.just("keep"), _AT, st.sampled_from(WAYS)),
    ),
    min_size=3,
    max_size=14,
)


class Writing(nn.Module):
    """Runs the instructions; what a "keep" names is left in ``kept`` with the way in which it is to be written."""

    def __init__(self, program):
        super().__init__()
        self.program, self.kept = program, []
        self.linear, self.wide = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, 2 * COLUMNS)

    def forward(self, x):
        self.kept, there = [], [self.linear(x)]
        for instruction in self.program:
            self._run(there, *instruction)
        return sum(tensor.sum() + tensor.square().mean() for tensor in there)

    def _run(self, there, what, *arguments):
        if not there:
            there.append(self.linear.weight[:ROWS] * 1.0)
        operands = [there[at % len(there)] for at in arguments if isinstance(at, int) and not isinstance(at, bool)]
        if what == "unary":
            there.append(_UNARY[arguments[0]](operands[0]))
        elif what == "multiply":
            there.append(operands[0] * operands[1])
        elif what == "chunks":
            # As torch's cells of GRU and LSTM do: pieces of one storage, each saved and written by itself.
            first, second = torch.unsafe_chunk(self.wide(operands[0]), 2, 1)
            first = first.sigmoid_()
            product = first * second.tanh()
            if arguments[1]:
                second = second.mul_(0.5)
            there += [product, second.tanh() * first]
        elif what == "rrelu":
            there.append(F.rrelu(operands[0], training=True))
        elif what == "dropout":
            there.append(F.dropout(operands[0], 0.3))
        elif what == "scribble":
            there.append(Scribbling.apply(operands[0]))
        elif what == "view":
            there.append(operands[0][:, ::2].repeat(1, 2).view_as(operands[0]))
        elif what == "write":
            write(operands[0], arguments[1])
        elif what == "drop":
            there[:] = [tensor for tensor in there if tensor is not operands[0]] or there
        else:
            self.kept.append((operands[0], arguments[1]))


def train(model, steps=3):
    """What each step gives: its loss and gradients, or that torch refused it, and where."""
    found = []
    for _ in range(steps):
        model.zero_grad()
        torch.manual_seed(1)
        data = torch.randn(ROWS, COLUMNS)
        try:
            loss = model(data)
            for tensor, how in model.kept:
                write(tensor, how)
        except RuntimeError:
            found.append("refused in the forward")
            continue
        finally:
            model.kept = [] if len(model.kept) % 2 else model.kept  # some are held into the backward
        try:
            loss.backward(retain_graph=True)
            loss.backward()
        except RuntimeError:
            found.append("refused in the backward")
            continue
        found.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return found
