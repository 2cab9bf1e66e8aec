"""Trials of recurrent networks: torch's layers and cells, packed and not, in all their forms and both types.

torch's CPU kernels split gates into pieces of one storage and write some of them in place after others were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from benchmarks.conformance.trial import Call, Trial

_INPUTS, _HIDDEN, _BATCH, _STEPS = 12, 16, 4, 6
_LENGTHS = (3, 6, 1, 5)  # in no order
_LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "RNN": nn.RNN,
    "RNN relu": partial(nn.RNN, nonlinearity="relu"),
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
}
_CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "RNNCell": nn.RNNCell,
    "LSTMCell": nn.LSTMCell,
    "GRUCell": nn.GRUCell,
}
_FORMS: dict[str, dict[str, Any]] = {
    "1 layer": {},
    "1 layer, batch first": {"batch_first": True},
    "1 layer, no bias": {"bias": False},
    "2 layers, both directions": {"num_layers": 2, "bidirectional": True},
    "2 layers, dropout": {"num_layers": 2, "dropout": 0.3},
    "3 layers, both directions, dropout, batch first": {
        "num_layers": 3,
        "bidirectional": True,
        "dropout": 0.3,
        "batch_first": True,
    },
}
_PROJECTED = {
    "1 layer, projected": {"proj_size": 5},
    "2 layers, both directions, projected": {"num_layers": 2, "bidirectional": True, "proj_size": 5},
}
_TYPES = (torch.float32, torch.bfloat16)


class Layers(nn.Module):
    """Layers between two linear ones; it may pack its padded batch, and carry states on from step to step."""

    def __init__(self, layers: nn.RNNBase, lengths: tuple[int, ...] | None, *, carries: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(_INPUTS, _INPUTS), layers
        self.last = nn.Linear((layers.proj_size or _HIDDEN) * (2 if layers.bidirectional else 1), 3)
        self.lengths, self.carries = lengths, carries
        self.state: Any = None

    def forward(self, batch: Tensor) -> Tensor:
        """Three numbers for each time and sequence."""
        inputs: Any = self.first(batch)
        is_batch_first = self.layers.batch_first
        if self.lengths is not None:
            inputs = pack_padded_sequence(
                inputs, torch.tensor(self.lengths), batch_first=is_batch_first, enforce_sorted=False
            )
        results, state = self.layers(inputs, self.state)
        if self.carries:
            self.state = tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()
        if self.lengths is not None:
            results, _ = pad_packed_sequence(results, batch_first=is_batch_first)
        return self.last(results)


class Unrolled(nn.Module):
    """A cell that walks over the batch's times; its results may be dropped out."""

    def __init__(self, cell: nn.RNNCellBase, dropout: float) -> None:
        super().__init__()
        self.first, self.cell, self.dropout = nn.Linear(_INPUTS, _INPUTS), cell, nn.Dropout(dropout)

    def forward(self, batch: Tensor) -> list[Tensor]:
        """The hidden state after each time."""
        state, results = None, []
        for inputs in self.first(batch).unbind(0):
            state = self.cell(inputs, state)
            results.append(self.dropout(state[0] if isinstance(state, tuple) else state))
        return results


def _packed() -> PackedSequence:
    return pack_padded_sequence(torch.randn(_STEPS, _BATCH, _INPUTS), torch.tensor(_LENGTHS), enforce_sorted=False)


def _models() -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], Any]]]:
    for kind, make in _LAYERS.items():
        forms = {**_FORMS, **(_PROJECTED if kind == "LSTM" else {})}
        for form, options in forms.items():
            batch = (_BATCH, _STEPS) if options.get("batch_first") else (_STEPS, _BATCH)
            make_layers = partial(make, _INPUTS, _HIDDEN, **options)
            make_batch = partial(torch.randn, *batch, _INPUTS)
            for way, lengths in (("", None), (", packed", _LENGTHS)):
                for carried, carries in (("", False), (", state carried on", True)):
                    yield (
                        f"{kind}, {form}{way}{carried}",
                        lambda m=make_layers, n=lengths, c=carries: Layers(m(), n, carries=c),
                        make_batch,
                    )
        yield f"{kind} itself", partial(make, _INPUTS, _HIDDEN), partial(torch.randn, _STEPS, _BATCH, _INPUTS)
        yield f"{kind} itself, packed", partial(make, _INPUTS, _HIDDEN), _packed
    for kind, make_cell in _CELLS.items():
        make_batch = partial(torch.randn, _STEPS, _BATCH, _INPUTS)
        for form, dropout in (("", 0.0), (", dropout", 0.45)):
            yield f"{kind}{form}", lambda m=make_cell, p=dropout: Unrolled(m(_INPUTS, _HIDDEN), p), make_batch


_MODELS = {name: (make_model, make_input) for name, make_model, make_input in _models()}
NAMES = tuple(_MODELS)


def trials(name: str) -> Iterator[Trial]:
    """The network in training mode, in both types."""
    make_model, make_input = _MODELS[name]
    for dtype in _TYPES:

        def make_call(dtype: torch.dtype = dtype) -> Call:
            return (make_input().to(dtype),), {}

        yield Trial(lambda dtype=dtype: make_model().to(dtype), make_call, name=str(dtype))
