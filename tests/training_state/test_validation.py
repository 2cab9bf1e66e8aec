"""Calls without gradients compute with weights that are swapped, and give the bits of plain torch."""

import pytest
import torch
from torch import nn

import lmswap
from tests.training import same_bits

WIDTH = 64


class Attention(nn.Module):
    """Attention of torch.nn, which has an operator of its own for calls without gradients; returns its weights, too."""

    def __init__(self, **options):
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(WIDTH, 4, batch_first=True), options
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        attended, weights = self.attention(x, x, x, **self.options)
        return self.head(attended), weights


class Masked(Attention):
    def forward(self, x):
        hidden = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device).tril(-1)
        attended, weights = self.attention(x, x, x, key_padding_mask=hidden, need_weights=True)
        return self.head(attended), weights


class Frozen(Attention):
    """Attention in evaluation mode beside what trains: also in a training step it needs no gradients."""

    def __init__(self):
        super().__init__(need_weights=False)
        self.attention.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.attention.eval()
        return self


class First(nn.Module):
    """A recurrent layer's outputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Table(nn.Module):
    """Rows that are scaled down, in place, as they are read."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(x.tanh()) + self.table(x.sum(-1).abs().long() % 32)


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "attention, averaged weights": Attention,
    "attention, weights": lambda: Attention(average_attn_weights=False),
    "attention, no weights": lambda: Attention(need_weights=False),
    "attention, masked": Masked,
    "attention, frozen": Frozen,
    "encoder": encoder,
    "encoder, norm first": lambda: encoder(norm_first=True, activation="gelu"),
    "LSTM": lambda: First(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)),
    "GRU": lambda: First(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
    "table": Table,
}


def outputs(model, x):
    made = model(x)
    return [made] if torch.is_tensor(made) else [each for each in made if each is not None]


def trained_and_validated(make, options=None):
    """Losses of two training steps, and outputs without gradients after each; ``options`` by the optimizer."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, found = make(), []
    shape = (64, WIDTH) if any(isinstance(each, nn.BatchNorm1d) for each in model.modules()) else (4, 64, WIDTH)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    if options is not None:
        lmswap.enable(model, budget="1GiB", policy="swap_all", min_swap_bytes=1024, **options(optimizer))
    for _ in range(2):
        x = torch.randn(shape)
        loss = outputs(model.train(), x)[0].square().mean()
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += outputs(model.eval(), x)
    if options is not None:
        lmswap.disable(model)
    return found


def with_optimizer(optimizer):
    return {"optimizer": optimizer}


def with_weights(_):
    return {"weights": "swap"}


QUICK = "attention, no weights"
CASES = [
    pytest.param(make, with_optimizer, id=name, marks=pytest.mark.slow if name != QUICK else ())
    for name, make in MODELS.items()
]
CASES.append(pytest.param(Attention, with_weights, id="attention, weights alone", marks=pytest.mark.slow))


@pytest.mark.parametrize(("make", "options"), CASES)
def test_validation_and_training_have_the_bits_of_plain_torch(make, options):
    assert same_bits(trained_and_validated(make, options), trained_and_validated(make))
