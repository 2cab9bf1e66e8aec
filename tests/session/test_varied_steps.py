"""Loops whose steps have other sizes: within a budget that makes plans move something, with plain torch's bits."""

import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.saved_tensors import step
from lmswap.session import budget
from tests.both_paths import PATHS
from tests.models import quick_of

pytestmark = [
    pytest.mark.cpu_only("counts the tensors of a CPU"),
    pytest.mark.usefixtures("resident", "_small_margins"),
    pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces"),
]


@pytest.fixture
def _small_margins(monkeypatch):
    for kind in ("_MARGIN", "_MARGIN_UNMOVED", "_MARGIN_SETTLED"):
        monkeypatch.setitem(vars(budget)[kind], "cpu", budget._Margin(2**18))
    monkeypatch.setattr(step, "_MAX_IN_TRANSIT_BYTES", 2**16)


class Texts(nn.Module):
    """Its activations have 1 MiB for 8 texts of 512 tokens."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(6):
            x = torch.tanh(self.inner(x))
        return x.mean(1)


class Messages(nn.Module):
    """Sums what each node of a graph gets along its edges."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, nodes, sources, targets):
        for _ in range(4):
            sent = torch.zeros_like(nodes).index_add(0, targets, nodes[sources])
            nodes = torch.tanh(self.inner(nodes) + sent)
        return nodes.mean(0)


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(4):
            x = torch.tanh(self.second(x))
        return x.mean((2, 3))


def texts(length, batch=8):
    return (torch.randn(batch, length, 64),)


def graph(num_nodes, num_edges):
    return torch.randn(num_nodes, 64), *torch.randint(num_nodes, (2, num_edges))


def loss(model, batch):
    return model(*batch).square().mean()


def each_alone(*batches):
    """A step for each batch."""

    def losses(model):
        for make in batches:
            yield loss(model, make())

    return losses


def evaluated(model):
    for length, other in ((480, 100), (300, 500), (512, 470), (450, 90), (500, 512)):
        yield loss(model, texts(length))
        model.eval()
        with torch.no_grad():
            model(*texts(other))
        model.train()


def accumulated(model):
    for length, other in ((500, 300), (200, 480), (512, 100), (450, 470)):
        (loss(model, texts(length)) / 2).backward()
        yield loss(model, texts(other)) / 2


def of_texts(*sizes):
    return each_alone(*(lambda size=size: texts(*size) for size in sizes))


LOOPS = {
    "evaluation at other lengths": (Texts, evaluated),
    "accumulation over lengths": (Texts, accumulated),
    "a curriculum": (Texts, of_texts(*((length,) for length in range(240, 520, 32)))),
    "a last batch that is smaller": (Texts, of_texts(*((512, 5 if number % 3 == 2 else 8) for number in range(9)))),
    "graphs": (
        Messages,
        each_alone(
            *(
                lambda sizes=sizes: graph(*sizes)
                for sizes in ((3000, 5000), (4096, 4000), (3500, 7000), (4000, 8192), (3900, 3000), (2000, 8000))
            )
        ),
    ),
    "resolutions": (
        Images,
        each_alone(
            *(
                lambda sides=sides: (torch.randn(4, 3, *sides),)
                for sides in ((96, 96), (80, 64), (64, 96), (90, 95), (95, 90), (70, 70), (96, 88))
            )
        ),
    ),
}
BUDGETS_MIB = {  # of 9, 9 or 14, and 17, which their largest steps take
    "fx": {Texts: 8.5, Messages: 8.5, Images: 15.5},
    "eager": {Texts: 8.5, Messages: 13, Images: 15.5},
}


def trained(name, after=lambda model: None, **options):
    """Losses and gradients of each step."""
    torch.manual_seed(0)
    torch.compiler.reset()
    make, loop = LOOPS[name]
    model, found = make(), []
    if options:
        lmswap.enable(model, min_swap_bytes=4096, **options)
    for each in loop(model):
        each.backward()
        found += [each.detach(), *(parameter.grad for parameter in model.parameters())]
        after(model)
        model.zero_grad()
    lmswap.disable(model)
    return found


# Graphs are traced three times.
QUICK = [("a last batch that is smaller", "fx"), *((name, "eager") for name in LOOPS)]


@pytest.mark.parametrize(("name", "path"), quick_of(itertools.product(LOOPS, PATHS), QUICK))
def test_steps_of_other_sizes_stay_within_the_budget_with_plain_bits(name, path):
    budget_bytes, peaks, moved = int(BUDGETS_MIB[path][LOOPS[name][0]] * 2**20), [], []

    def note(model):
        report = lmswap.report(model)
        peaks.append(report.measured_peak_bytes)
        moved.append(report.swapped_out_bytes + report.recomputed_bytes)

    assert all(map(torch.equal, trained(name, note, compiler=path, budget=budget_bytes), trained(name)))
    assert max(peaks) <= budget_bytes
    assert any(moved)
