"""Profiles some steps of a training from inside of the script, and writes figures, a trace and a picture."""

import argparse
from pathlib import Path

import torch
from torch import nn

import lmswap


def main() -> None:
    """Trains, profiles the steps after the last plan was made, and says where their time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--budget", default="180MiB")
    parser.add_argument("--output", type=Path, default=Path("profile-output"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    layers = [each for _ in range(options.layers) for each in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    lmswap.enable(model, budget=options.budget)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randn(options.batch, 512)
            nn.functional.mse_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(5)  # the first steps capture and plan; the last plan is made after the fourth
    with lmswap.profile() as profile:
        train(3)
    print(profile)
    (options.output / "profile.json").write_text(profile.to_json())
    profile.to_chrome_trace(options.output / "profile-trace.json")  # for Perfetto
    report = lmswap.report(model)
    report.plot(options.output / "step.png")
    for note in report.notes:
        print(note)


if __name__ == "__main__":
    main()
