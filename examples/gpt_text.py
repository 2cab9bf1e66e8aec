"""Trains a small GPT on the characters of a text, in less memory than its activations need."""

import argparse
from pathlib import Path

import torch
from torch import nn

import lmswap

WIDTH, HEADS = 256, 8


class GPT(nn.Module):
    """Layers of causal attention over characters (bytes)."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(length, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Maps (N, length) bytes to (N, length, 256) scores of the next one."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        scores: torch.Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return scores


def main() -> None:
    """Trains, and says what the memory was and what the swapping cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this script")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budget", default="250MiB")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    text = torch.tensor(list(options.text.read_bytes()))
    model = GPT(options.layers, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    lmswap.enable(model, budget=options.budget)
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.length, (options.batch, 1))
        window = text[starts + torch.arange(options.length + 1)]
        loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(lmswap.report(model))


if __name__ == "__main__":
    main()
