"""Code that disables saved-tensor hooks runs in an enabled model as without one, and leaves the process usable."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap

import lmswap
from lmswap.errors import NotManaged
from lmswap.saved_tensors.hooks import Hooks


class Energy(nn.Module):
    """What a transform of its own network gives, between layers that save as ever."""

    def __init__(self, transform):
        super().__init__()
        self.transform = transform
        self.first, self.network = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def energy(self, x):
        return self.network(x).sin().sum()

    def forward(self, x):
        h = self.first(x).exp()
        return h.sin() * self.transform(self, h)


def sensitivity(model, x):
    parameters = dict(model.network.named_parameters())
    return grad(lambda p: functional_call(model.network, p, (x,)).square().sum())(parameters)["2.weight"].sum()


def breaks(model, x):
    """Breaks the graph inside of the transform."""

    def energy(row):
        torch._dynamo.graph_break()
        return model.energy(row)

    return vmap(grad(energy))(x)


def opts_out(model, x):
    with disable_saved_tensors_hooks("nothing here may be packed"):
        return model.energy(x) * x


TRANSFORMS = {
    "grad": lambda model, x: grad(model.energy)(x),
    "rows": lambda model, x: vmap(grad(model.energy))(x),
    "twice": lambda model, x: grad(lambda y: grad(model.energy)(y).square().sum())(x),
    "vjp": lambda model, x: vjp(model.network, x)[1](torch.ones(len(x), 1))[0],
    "jacrev": lambda model, x: jacrev(model.network)(x[0])[0],
    "hessian": lambda model, x: hessian(model.energy)(x[0]).sum(0),
    "vmap": lambda model, x: vmap(model.network)(x),
    "parameters": sensitivity,
    "breaks": breaks,
    "opts_out": opts_out,
}


def train(model):
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = model(torch.randn(5, 4)).square().sum()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("path", ["fx", "eager"])
def test_a_model_that_disables_hooks_trains_and_so_does_the_next(path, name):
    torch.compiler.reset()
    for transform in (TRANSFORMS[name], lambda _, x: x):
        torch.manual_seed(0)
        expected = train(Energy(transform))
        torch.manual_seed(0)
        model = lmswap.enable(Energy(transform), "2GiB", policy="swap_all", min_swap_bytes=1, compiler=path)
        actual = train(model)
        assert lmswap.report(model).trains
        lmswap.disable(model)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))


def test_the_contexts_error_survives_hooks_removed_by_a_signal():
    with pytest.raises(KeyboardInterrupt), Hooks().on(lambda tensor: tensor, lambda tensor: tensor):
        torch._C._autograd._pop_saved_tensors_default_hooks()  # as within `without_hooks`, which a signal left
        raise KeyboardInterrupt
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_of_others_are_refused_as_by_torch():
    model = lmswap.enable(nn.Linear(2, 2), "2GiB", compiler="eager")
    with (
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        pytest.raises(RuntimeError, match="may be packed"),
        disable_saved_tensors_hooks("nothing here may be packed"),
    ):
        pass
    lmswap.disable(model)


@pytest.mark.parametrize("path", ["fx", "eager"])
def test_a_call_where_hooks_are_disabled_runs_unmanaged_with_a_warning(path):
    torch.compiler.reset()
    model = lmswap.enable(nn.Linear(2, 2), "2GiB", compiler=path)
    expected = nn.functional.linear(torch.ones(2), model.weight, model.bias)
    with (
        disable_saved_tensors_hooks("nothing here may be packed"),
        pytest.warns(NotManaged, match="hooks are disabled .*nothing here may be packed"),
    ):
        assert torch.equal(model(torch.ones(2)), expected)
    assert torch.equal(model(torch.ones(2)), expected)
    lmswap.disable(model)
