"""The report notes where graphs add gradients in another order than plain torch, and nowhere else."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

import lmswap
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.ir import backward_parts

pytestmark = pytest.mark.cpu_only("who adds gradients, and in which order, is autograd's, on the host")


class Tied(nn.Module):
    """Uses one weight several times and the others once."""

    def __init__(self, width=32):
        super().__init__()
        self.tied, self.once = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.tied(x))
        return self.once(x)


def plainly(model, x):
    return model(x).square().mean()


def penalised(names):
    def loss(model, x):
        parameters = dict(model.named_parameters())
        return model(x).square().mean() + sum(parameters[name].square().sum() for name in names)

    return loss


def penalised_before(model, x):
    """The backward comes to the penalty when it has been through the model."""
    penalty = model.tied.weight.square().sum()
    return model(x).square().mean() + penalty


def twice(model, x):
    return (model(x) + model(x + 1)).square().mean()


def with_a_hook(model, x):
    model.tied.weight.register_hook(lambda gradient: gradient * 1)
    return plainly(model, x)


def of_the_input(model, x):
    x = (x * model.once.bias).detach().requires_grad_()
    loss = plainly(model, x)
    torch.autograd.grad(loss, x, retain_graph=True)
    return loss


def drive(model, loss, num_steps=3):
    torch.manual_seed(1)
    gradients = []
    for _ in range(num_steps):
        loss(model, torch.randn(16, 32)).backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return gradients


def both(loss):
    """The gradients by plain torch and by lmswap, and what is said of rounding."""
    torch.compiler.reset()
    torch.manual_seed(0)
    expected = drive(Tied(), loss)
    torch.manual_seed(0)
    model = lmswap.enable(Tied(), policy="swap_all", budget="1GiB", min_swap_bytes=1)
    actual = drive(model, loss)
    notes = [note for note in lmswap.report(model).notes if note.startswith(ROUNDED_OTHERWISE)]
    lmswap.disable(model)
    return expected, actual, notes


@pytest.fixture(params=["at the end", "by gates"])
def how_gradients_come(request, tmp_path, monkeypatch):
    if request.param == "at the end":
        yield
        return
    monkeypatch.setattr(backward_parts, "_MIN_BYTES", 1)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OTHERWISE = {
    "penalty": penalised(["tied.weight"]),
    "penalty of all": penalised(["tied.weight", "tied.bias", "once.weight"]),
    "penalty before": penalised_before,
    "two forwards": twice,
}
ALIKE = {
    "plain": plainly,
    "penalty of what is used once": penalised(["once.weight", "once.bias"]),
    "a hook of the user's": with_a_hook,
    "input": of_the_input,
}


@pytest.mark.usefixtures("how_gradients_come")
@pytest.mark.parametrize("loss", OTHERWISE.values(), ids=OTHERWISE)
def test_a_sum_that_continues_outside_of_the_graph_is_reported(loss):
    expected, actual, notes = both(loss)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert ["several times" in note for note in notes].count(True) == 1


@pytest.mark.usefixtures("how_gradients_come")
@pytest.mark.parametrize("loss", ALIKE.values(), ids=ALIKE)
def test_no_note_where_the_order_is_that_of_plain_torch(loss):
    expected, actual, notes = both(loss)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert notes == []


def test_nothing_is_left_on_nodes_that_a_backward_does_not_reach():
    torch.compiler.reset()
    model = lmswap.enable(Tied(), policy="swap_all", budget="1GiB", min_swap_bytes=1)
    for _ in range(5):
        x = torch.randn(16, 32, requires_grad=True)
        torch.autograd.grad(plainly(model, x), x)
    drive(model, plainly)
    drive(model, penalised(["tied.weight"]))
    assert [note.startswith(ROUNDED_OTHERWISE) for note in lmswap.report(model).notes].count(True) == 1
    lmswap.disable(model)
