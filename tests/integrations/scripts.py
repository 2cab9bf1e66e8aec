"""The training of all trainer scripts, and the figures by which they are compared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lmswap.hardware.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes
from lmswap.reporting import Report

FEATURES, WIDTH, LAYERS, BATCH, STEPS = 4, 64, 12, 2**15, 3
FEW = 64  # the batch where memory is not the question
PLAIN_BYTES = 2 * LAYERS * WIDTH * BATCH * 4  # what a step saves: each layer's input, and the GELU's
BUDGET_BYTES = PLAIN_BYTES * 3 // 4
WIDE = {"width": 1024, "layers": 12}  # a network with little beside its training state
STATE_BYTES = 4 * 12 * 1024**2 * 4  # parameters, gradients, and the two values that AdamW keeps of each
STATE_BUDGET_BYTES = STATE_BYTES * 3 // 4
# With it, parameters are non-resident between steps, and updates fetch them.
SWAPPED_PARAMETERS = {"optimizer": True, "policy": "swap_all", "min_swap_bytes": 1024}


class Network(nn.Module):
    """Little to compute and much to keep."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        hidden = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), *hidden, nn.Linear(width, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def loader(batch: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(STEPS * batch, FEATURES, generator=generator)
    return DataLoader(TensorDataset(rows, rows.flip(1)), batch_size=batch)


class Grown:
    """What resident memory grew by at most."""

    nbytes = 0


@contextmanager
def grown() -> Iterator[Grown]:
    measured, before = Grown(), resident_bytes()
    reset_peak_resident()
    yield measured
    measured.nbytes = peak_resident_bytes() - before


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def streams_within_the_budget(report: Report) -> bool:
    """Whether a part of a training state that does not fit was non-resident, and the rest did not exceed the budget."""
    return report.state_in_bytes > 0 and report.highest_peak_bytes <= STATE_BUDGET_BYTES


def scalars(folder) -> dict[str, dict[int, float]]:
    """What TensorBoard reads in ``folder``: by name, the values by step; of ours there is one each."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    values = {tag: {event.step: event.value for event in series} for tag, series in found.items()}
    assert all(len(values[tag]) == len(series) for tag, series in found.items() if "lmswap/" in tag)
    return values
