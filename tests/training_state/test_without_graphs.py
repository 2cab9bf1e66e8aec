"""Non-resident weights in calls without a graph: fetched in the order of an earlier call, and plain torch's bits."""

from itertools import pairwise
from threading import Thread

import pytest
import torch
from torch import nn

import lmswap
from lmswap.dispatch import ModelCall
from lmswap.runtime.host_copies import HostCopies
from lmswap.torch_compat.modules import compiled_call
from tests.training import session_of
from tests.training_state.adapted import same

WIDTH = 64
WEIGHT_BYTES = 4 * WIDTH * WIDTH


class Untraced(nn.Module):
    """Frozen layers around a trained one, in code that torch is not to trace."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def forward(self, x, order=(0, 1, 2, 3)):
        x = self.trained(x)
        for number in order:
            x = self.between(torch.tanh(self.layers[number](x)))
        return x.square().mean()

    def between(self, x):
        return x


class Wide(Untraced):
    """Pairs of frozen layers of 8 MiB each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2**15), nn.Linear(2**15, WIDTH)) for _ in range(4))
        self.layers.requires_grad_(False)


class Writing(Untraced):
    """Writes a frozen weight in each call, in a way that changes no version counter."""

    @torch._dynamo.disable
    def forward(self, x):
        self.layers[2].weight.data.mul_(0.9)
        loss = super().forward(x)
        self.layers[1].weight.data.mul_(0.9)
        return loss


class Tied(Untraced):
    """Layers that share a weight, which is also read as it is and in part."""

    def __init__(self):
        super().__init__()
        self.layers[3].weight = self.layers[0].weight

    def between(self, x):
        return x @ self.layers[0].weight + self.layers[1].weight[3:5].sum() + self.layers[2].weight.to(x.dtype).sum()


class Casting(Untraced):
    """Reads its weights by autocast."""

    @torch._dynamo.disable
    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


class Checkpointed(Untraced):
    """Runs a layer a second time in the backward."""

    def between(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers[1], x, use_reentrant=False)


def enabled(model, budget="1GiB"):
    return lmswap.enable(model, budget, policy="swap_all", weights="swap", min_swap_bytes=1024)


def made(kind=Untraced):
    torch.manual_seed(0)
    return kind()


def train(model, steps=4, **kwargs):
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(8, WIDTH), **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(each.detach().clone() for each in model.parameters())]


def reads(monkeypatch):
    """A list to which each start, end and cancellation of a copy is added, with the host copy's handle."""
    found = []

    def note(name):
        call = getattr(HostCopies, name)

        def noting(self, fetched):
            found.append((name, fetched.handle))
            return call(self, fetched)

        monkeypatch.setattr(HostCopies, name, noting)

    for name in ("start_move", "finish_read", "cancel_read"):
        note(name)
    return found


def held(model):
    call = compiled_call(model)
    assert isinstance(call, ModelCall)
    return call.hooked._ahead._held


@pytest.mark.parametrize("kind", [Untraced, Writing, Tied, Casting, Checkpointed], ids=lambda kind: kind.__name__)
def test_bits_are_those_of_plain_torch(kind, monkeypatch):
    expected = train(made(kind))
    found = reads(monkeypatch)
    model = enabled(made(kind))
    assert same(train(model), expected)
    assert held(model) == {}
    assert sum(name == "finish_read" for name, _ in found) >= 4
    assert "path: saved-tensor hooks" in str(lmswap.report(model)).replace("\n", " ")


def test_weights_are_fetched_while_earlier_ones_are_read(monkeypatch):
    model = enabled(made())
    train(model)
    found = reads(monkeypatch)
    train(model, 1)
    handles = [session_of(model).engine.host_copies.find(each.weight.untyped_storage()) for each in model.layers]
    forward = found[: 2 * len(handles)]
    assert [handle for name, handle in forward if name == "finish_read"] == handles
    for one, following in pairwise(handles):
        assert forward.index(("start_move", following)) < forward.index(("finish_read", one))
    assert [handle for name, handle in found[len(forward) :] if name == "finish_read"] == handles[::-1]
    assert all(name != "cancel_read" for name, _ in found)


def test_no_more_than_two_weights_are_held(monkeypatch):
    model = enabled(made())
    train(model)
    peaks = []

    def noting(self, fetched, call=HostCopies.finish_read):
        peaks.append(len(held(model)))
        return call(self, fetched)

    monkeypatch.setattr(HostCopies, "finish_read", noting)
    train(model, 1)
    assert max(peaks) == 2
    assert held(model) == {}


def test_weights_may_be_read_in_another_order():
    def run(model):
        orders = (0, 1, 2, 3), (3, 1, 0), (2, 2, 2), (0, 1, 2, 3)
        return [each for order in orders for each in train(model, 2, order=order)]

    assert same(run(enabled(made())), run(made()))


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # by pages that the first step maps
def test_the_budget_includes_what_is_fetched():
    model = lmswap.enable(made(Wide), "48MiB", weights="swap")  # of 64
    for _ in range(4):
        model(torch.randn(8, WIDTH)).backward()
        model.zero_grad()
    report = lmswap.report(model)
    assert report.measured_peak_bytes <= report.budget_bytes


def test_calls_without_gradients_that_are_not_traced_fetch_weights(monkeypatch):
    plain, model = made(), enabled(made())
    found = reads(monkeypatch)
    for context in (torch.no_grad, torch.inference_mode):
        for length in range(1, 30):
            x = torch.randn(length, WIDTH)
            with context():
                assert torch.equal(model(x), plain(x))
    assert sum(name == "finish_read" for name, _ in found) > 30


def test_threads_read_at_once():
    plain, model, found = made(), enabled(made()), []
    x = torch.randn(8, WIDTH)

    def predict():
        with torch.no_grad():
            found.extend(model(x) for _ in range(50))

    threads = [Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    predict()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert same(found, [plain(x)] * 200)
    assert held(model) == {}


def test_an_exception_leaves_nothing_to_be_undone():
    class Raising(Untraced):
        raises = False

        def between(self, x):
            if self.raises:
                raise ValueError("in mid-step")
            return x

    plain, model = made(Raising), enabled(made(Raising))
    expected = train(plain) + train(plain)
    found = train(model)
    model.raises = True
    with pytest.raises(ValueError, match="in mid-step"):
        train(model, 1)
    assert held(model) == {}
    model.raises = False
    assert same(found + train(model), expected)


def test_what_the_caller_writes_between_calls_is_read():
    def run(model):
        seen = []
        for step in range(6):
            seen += train(model, 1)
            weight = model.layers[step % 4].weight
            weight.data.mul_(0.5)
            if model.trained.weight.device.type == "cpu":
                weight.numpy()[step] = 1
        return seen

    assert same(run(enabled(made())), run(made()))


@torch.library.custom_op("lmswap_tests::add_to", mutates_args=())
def add_to(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight.data += 1  # which its schema does not say
    return x + weight.sum()


def _sum(ctx, gradient):
    return gradient, None


add_to.register_autograd(_sum)


def test_a_weight_is_read_in_place_once_a_custom_operator_may_write_it():
    class Custom(Untraced):
        def between(self, x):
            return torch.ops.lmswap_tests.add_to(x, self.layers[2].weight)

    assert same(train(enabled(made(Custom))), train(made(Custom)))
