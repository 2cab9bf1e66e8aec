"""One script for a machine with a GPU and one without: the budget follows the device, the training loop does not."""

import argparse
from itertools import pairwise

import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError, PlanInfeasible


def make_model() -> nn.Module:
    """A plain convolutional network over images."""
    channels = [3, 32, 32, 64, 64]
    layers: list[nn.Module] = []
    for into, out in pairwise(channels):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def main() -> None:
    """Trains on the first GPU, swapping to pinned memory, or else on the CPU, swapping to a disk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-budget", default="4GiB", help="of what torch reserves of the card")
    parser.add_argument("--cpu-budget", default="320MiB", help="of what resident memory grows by")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    try:
        lmswap.enable(model, budget=options.gpu_budget if on_gpu else options.cpu_budget)
    except OptionError as error:  # more than the device has, for instance
        print(f"trains without a budget: {error}")
    for step in range(options.steps):
        images = torch.randn(options.batch, 3, options.side, options.side, device=device)
        labels = torch.randint(10, (options.batch,), device=device)
        try:
            loss = nn.functional.cross_entropy(model(images), labels)
        except PlanInfeasible as error:
            raise SystemExit(f"{error} That is {error.needed_bytes} bytes.") from error
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} on {device}: loss {loss.item():.4f}")
    print(lmswap.report(model))


if __name__ == "__main__":
    main()
