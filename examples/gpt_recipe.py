"""A recipe for a GPT: small batches that add up to a step, and figures of each step in TensorBoard."""

import argparse
from pathlib import Path

import torch
from torch import nn

import lmswap

WIDTH, LENGTH = 256, 128


class GPT(nn.Module):
    """Layers of causal attention over bytes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Maps (N, LENGTH) bytes to scores of the next ones."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        return self.head(self.layers(self.bytes(text) + self.positions.weight, mask=mask, is_causal=True))


def main() -> None:
    """Trains, and says what the memory was and what the swapping cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 4, "batch": 16, "accumulate": 2, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="250MiB")
    parser.add_argument("--tensorboard", help="a folder for the figures; needs the package of that name")
    options = parser.parse_args()
    torch.manual_seed(0)
    text, model, writer = torch.tensor(list(Path(__file__).read_bytes())), GPT(options.layers), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if options.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(options.tensorboard)
    lmswap.enable(model, options.budget)
    for step in range(options.steps):
        for _ in range(options.accumulate):
            window = text[torch.randint(len(text) - LENGTH, (options.batch, 1)) + torch.arange(LENGTH + 1)]
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
            (loss / options.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
        if writer:
            for name, figure in {"loss": loss.item(), **lmswap.report(model).metrics()}.items():
                writer.add_scalar(name, figure, step)
    print(lmswap.report(model))


if __name__ == "__main__":
    main()
