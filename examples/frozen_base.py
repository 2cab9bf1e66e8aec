"""Trains small adapters on a frozen base that is larger than the budget, validates, and predicts."""

import argparse

import torch
from torch import nn

import lmswap


class Adapted(nn.Linear):
    """A linear layer whose weight is frozen, and a trained product of two small matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with its adapter's."""
        return super().forward(x) + self.up(self.down(x))


def block(width: int) -> nn.Module:
    """A block of a network, with two adapted layers."""
    return nn.Sequential(Adapted(width, 4 * width), nn.GELU(), Adapted(4 * width, width), nn.LayerNorm(width))


def main() -> None:
    """Train, validate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="700MiB")
    parser.add_argument("--weights", default="auto", help="on a CPU: swap")
    arguments = parser.parse_args()

    width, layers = arguments.width, arguments.layers
    model = nn.Sequential(*(block(width) for _ in range(layers)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"parameters: {sum(p.nbytes for p in model.parameters()) / 2**20:.0f} MiB")
    lmswap.enable(model, arguments.budget, device=device, weights=arguments.weights)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(arguments.steps):
        x = torch.randn(arguments.batch, width, device=device)
        (loss := (model(x) - x.flip(1)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # within the same budget
            error = (model(x) - x.flip(1)).abs().mean()
        print(f"step {step}: loss {loss.item():.4f}, mean error {error.item():.4f}")
    print(lmswap.report(model))


if __name__ == "__main__":
    main()
