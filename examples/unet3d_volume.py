"""Trains a 3D U-Net on a whole volume, a NIfTI file or a made one, in less memory than plain torch takes."""

import argparse
import sys
from pathlib import Path

import torch

import lmswap

sys.path.append(str(Path(__file__).parents[1]))  # the network is one of the checkout's benchmarks
from benchmarks.unet3d.loss import weighted_dice_loss
from benchmarks.unet3d.network import UNet3d


def read_volume(path: str | None, side: int) -> torch.Tensor:
    """A batch of one volume of ``side``³ voxels: a file's, resampled and normalized, or a ball in noise."""
    if path is None:
        z, y, x = (axis.float() for axis in torch.meshgrid(*[torch.arange(side)] * 3, indexing="ij"))
        ball = ((z - side / 2) ** 2 + (y - side / 2) ** 2 + (x - side / 2) ** 2).sqrt() < side / 4
        volume = ball + 0.5 * torch.randn(side, side, side)
    else:
        import nibabel

        volume = torch.from_numpy(nibabel.load(path).get_fdata(dtype="float32"))
    volume = torch.nn.functional.interpolate(volume[None, None], size=(side,) * 3, mode="trilinear")
    return (volume - volume.mean()) / volume.std()


def train(volume: torch.Tensor, budget: str, steps: int) -> UNet3d:
    """The network after some steps within the budget."""
    truth = (volume > 1).float()  # bright voxels: a stand-in for a label map
    model = UNet3d(modalities=1, labels=1).to(volume.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lmswap.enable(model, budget=budget)
    for step in range(steps):
        loss = weighted_dice_loss(model(volume), truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    return model


def main() -> None:
    """Trains, and says what the memory was and what the swapping cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("volume", nargs="?", help="a NIfTI file; default: a synthetic one")
    parser.add_argument("--side", type=int, default=64, help="voxels, a multiple of 16")
    parser.add_argument("--budget", default="350MiB")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = train(read_volume(options.volume, options.side), options.budget, options.steps)
    print(lmswap.report(model))
    lmswap.disable(model)


if __name__ == "__main__":
    main()
