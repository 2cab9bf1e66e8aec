"""One capture serves calls of all sizes whose steps need no swaps; the others have plans of their own."""

import itertools

import pytest
import torch
from torch import nn

import lmswap
from lmswap.api import _session
from lmswap.session import budget

pytestmark = [
    pytest.mark.cpu_only("on a GPU tensors have offsets, which are those of one size"),
    pytest.mark.usefixtures("resident"),
]
LENGTHS = (24, 40, 31, 12, 64, 24, 7, 80)


class Tokens(nn.Module):
    """A transformer with tied weights, dropout and statistics of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(64, 128), nn.Embedding(128, 128)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, 0.1, batch_first=True, norm_first=True)
        self.norm = nn.BatchNorm1d(128)

    def forward(self, ids, cuts=()):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(ids) + self.position(torch.arange(length))
        x = self.layer(x, mask, is_causal=True)
        x = self.norm(x.flatten(0, 1)).view_as(x) / length**0.5
        if cuts:
            x = torch.cat([part.cumsum(1) for part in x.split([*cuts], 1)], 1)
        return x @ self.embedding.weight.T


def calls(lengths=LENGTHS):
    return [(torch.randint(0, 64, (8, length)),) for length in lengths]


LOSSES = {
    "mean": lambda logits: logits.square().mean(),
    "sum": lambda logits: logits.sum(),
    "cross entropy": lambda logits: nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 64
    ),
}


def enabled(model, **options):
    torch.compiler.reset()
    return lmswap.enable(model, **({"budget": "4GiB", "min_swap_bytes": 4096} | options))


def trained(model, batches, loss=LOSSES["mean"], *, after=lambda step: None):
    """Losses, gradients and buffers after each step."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(model.parameters(), 1e-3), []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        value = loss(model(*batch))
        value.backward()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        optimizer.step()
        after(step)
    return found


def made():
    torch.manual_seed(0)
    return Tokens()


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("loss", ["mean", "sum", pytest.param("cross entropy", marks=pytest.mark.slow)])
def test_lengths_that_vary_are_traced_three_times_and_have_plain_bits(loss):
    model, batches = enabled(made()), calls()
    assert same(trained(model, batches, LOSSES[loss]), trained(made(), batches, LOSSES[loss]))
    assert len(_session(model).graphs) == 3  # those of two lengths, and one for all
    assert not any("gradients entered a backward" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)


def test_whole_numbers_that_cut_tensors_are_traced_three_times_and_have_plain_bits():
    model, ids = enabled(made()), calls([48] * 8)
    cuts = [[first, 40 - first, 8] for first in (10, 25, 33, 12, 5, 8, 31, 20)]
    batches = [(*given, cut) for given, cut in zip(ids, cuts, strict=True)]
    assert same(trained(model, batches), trained(made(), batches))
    assert len(_session(model).graphs) == 3
    lmswap.disable(model)


def test_two_sizes_are_two_traces_of_their_own():
    """As of a last batch that is smaller: what is planned for the others is not captured again."""
    model, batches = enabled(made()), calls([64, 64, 40, 64, 64, 40])
    assert same(trained(model, batches), trained(made(), batches))
    graphs = _session(model).graphs
    assert [graph.program.name for graph in graphs] == ["Tokens"] * 2
    assert all(graph._symbolic is None for graph in graphs)
    lmswap.disable(model)


def least_bytes(length):
    """The budget that a step of this length needs without swaps."""
    torch.compiler.reset()
    model = lmswap.enable(made(), "4GiB", policy="none")
    trained(model, calls([length]))
    report = lmswap.report(model)
    lmswap.disable(model)
    return report.predicted_peak_bytes + report.margin_bytes


@pytest.fixture
def _small_margins(monkeypatch):
    for kind in ("_MARGIN", "_MARGIN_UNMOVED", "_MARGIN_SETTLED"):
        monkeypatch.setitem(vars(budget)[kind], "cpu", budget._Margin(64 * 2**10))


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of first steps, by what their losses take
@pytest.mark.usefixtures("_small_margins")
def test_sizes_whose_steps_do_not_fit_get_plans_of_their_own():
    between_bytes = (least_bytes(48) + least_bytes(128)) // 2
    batches = calls([24, 40, 31, 128, 33, 120, 16, 128, 48])
    model, moved = enabled(made(), budget=between_bytes), {}

    def note(step):
        report = lmswap.report(model)
        moved[batches[step][0].shape[1]] = report.swapped_out_bytes + report.recomputed_bytes

    assert same(trained(model, batches, after=note), trained(made(), batches))
    assert moved[128] > 0
    assert not any(moved[length] for length in (31, 33, 16, 48))
    assert len(_session(model).graphs) < len(moved)
    lmswap.disable(model)


@pytest.mark.filterwarnings("ignore::lmswap.errors.ManyTraces")
@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.usefixtures("_small_margins")
def test_a_plan_that_has_to_move_tensors_from_now_on_serves_one_size(resident):
    need_bytes = least_bytes(64)
    batches = calls([64, 60, 56, 64, 62, 50, 64, 56, 50, 62, 64])
    model = enabled(made(), budget=need_bytes + 2**25)

    def grow(step):
        resident.other_bytes += (2**25 + need_bytes // 8) * (step == 4)

    assert same(trained(model, batches, after=grow), trained(made(), batches))
    report = lmswap.report(model)
    assert report.swapped_out_bytes + report.recomputed_bytes > 0
    lmswap.disable(model)


def test_sizes_that_share_memory_with_others_are_captured_by_themselves():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, y):
            return (x * y).sum() * self.weight

    def sums(model):
        torch.manual_seed(1)
        pairs = ((torch.randn(40), torch.randn(40)) for _ in itertools.count())
        return [
            model(one[:size], (one if shares else other)[4 : 4 + size]).detach()
            for size, shares, (one, other) in zip((9, 11, 12, 12, 13, 13), (0, 0, 0, 1, 0, 1), pairs, strict=False)
        ]

    model = enabled(Adds())
    assert same(sums(model), sums(Adds()))
    lmswap.disable(model)


def test_the_report_predicts_the_sizes_of_the_last_step():
    model, batches = enabled(made()), calls([24, 40, 31, 128, 8])
    trained(model, batches)
    small = lmswap.report(model)
    trained(model, calls([128]))
    large = lmswap.report(model)
    assert large.predicted_peak_bytes > 1.5 * small.predicted_peak_bytes
    lmswap.disable(model)


def test_evicted_captures_are_traced_again():
    model, batches = enabled(made()), calls()
    expected = trained(made(), batches)
    found = trained(model, batches, after=lambda step: step == 5 and _session(model).traces.evict_complete())
    assert same(found, expected)
    lmswap.disable(model)
