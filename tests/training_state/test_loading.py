"""Models that are made on 'meta' and loaded file by file, and what is refused before anything starts."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from tests.training_state.adapted import same, train

WIDTH = 32


class Rotated(nn.Module):
    """Frozen layers with a computed table, which no checkpoint has, between an embedding and the head it is tied to."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("table", self.rotation(), persistent=False)
        self.adapter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1000, bias=False)
        self.tie()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)

    @staticmethod
    def rotation():
        return torch.linspace(0, 1, WIDTH).cos()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x * self.table))
        return self.head(self.adapter(x))


def trained(model):
    torch.manual_seed(0)
    return train(model, 3)


@pytest.fixture
def files(tmp_path):
    """The plain model, and the files of its checkpoint, as torch.load maps them."""
    torch.manual_seed(0)
    model = Rotated()
    state = model.state_dict()
    del state["head.weight"]  # as safetensors keeps one of those that are tied
    names = [*state]
    for start in range(0, len(names), 3):
        torch.save({name: state[name] for name in names[start : start + 3]}, tmp_path / f"{start}.pt")
    return model, sorted(tmp_path.glob("*.pt"))


def test_a_model_from_meta_that_is_loaded_file_by_file_trains_with_plain_bits(files):
    plain, paths = files
    with torch.device("meta"):
        model = Rotated()
    with pytest.raises(OptionError, match=r"'embed\.weight', 'layers\.0\.weight'.* and 9 more, on 'meta': load"):
        lmswap.enable(model)
    for path in paths:
        model.load_state_dict(torch.load(path, mmap=True), strict=False, assign=True)
    with pytest.raises(OptionError, match=r"for 'head\.weight', 'table', on 'meta'.*; compute 'table', which"):
        lmswap.enable(model)
    model.tie()
    model.table = model.rotation()
    lmswap.enable(model, "1GiB", policy="swap_all", weights="swap", min_swap_bytes=1024)
    assert same(trained(model), trained(plain))
    assert lmswap.report(model).swapped_in_bytes > 4 * WIDTH * WIDTH * 4
    assert model.head.weight is model.embed.weight
