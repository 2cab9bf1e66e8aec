"""A small network and its training on both paths: captured graphs ("fx") and saved-tensor hooks ("eager")."""

import torch
from torch import nn

import lmswap

PATHS = ("fx", "eager")


class Net(nn.Module):
    """Convolutions, batch norm and a head; ``middle`` is what the cases put between them."""

    def __init__(self, middle=None):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)
        self.middle = middle

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        if self.middle is not None:
            x = self.middle(x)
        return self.head(torch.tanh(self.second(x)).mean((2, 3)))


def batch(size=8, side=16):
    return torch.randn(size, 3, side, side)


def swapping(model, path, **options):
    return lmswap.enable(model, compiler=path, policy="swap_all", min_swap_bytes=2048, **options)


def steps(model, num=3, *, run=None, make=batch):
    """Losses, gradients and buffers of a few steps with an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(num):
        loss = run(model, make()) if run else model(make()).square().mean()
        if loss is not None:
            loss.backward()
            found.append(loss.detach().clone())
            del loss
        # Graphs give zeros where torch itself gives no gradient.
        found += [torch.zeros(()) if p.grad is None or not p.grad.any() else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [value.clone() for value in model.state_dict().values()]


class Break(nn.Module):
    def forward(self, x):
        x = torch.tanh(x)
        torch._dynamo.graph_break()
        return x.exp().sigmoid()


class EagerInside(nn.Module):
    """Saves a large tensor in a function that torch.compile skips."""

    @torch._dynamo.disable
    def forward(self, x):
        y = torch.tanh(x)
        return y.exp() * y
