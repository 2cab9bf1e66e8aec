"""Trains through torch.compile(backend="lmswap"), and compares the bits with the same training in plain torch."""

import argparse
import copy

import torch
from torch import nn

import lmswap


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """Trains an autoencoder for a step a batch; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains twice and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--budget", default="200MiB")
    options = parser.parse_args()

    torch.manual_seed(0)
    layers = [each for _ in range(options.layers) for each in (nn.Linear(512, 512), nn.GELU())]
    plain = nn.Sequential(*layers)
    original = copy.deepcopy(plain)
    compiled = torch.compile(original, backend="lmswap", options={"budget": options.budget})
    batches = [torch.randn(options.batch, 512) for _ in range(5)]
    losses = train(compiled, batches)
    print(lmswap.report(compiled))
    lmswap.disable(compiled)
    same = losses == train(plain, batches) and all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), original.parameters(), strict=True)
    )
    print("losses and weights:", "the same bits as plain torch" if same else "OTHER bits than plain torch")


if __name__ == "__main__":
    main()
