"""In distributed training, gradients accumulate while the backward that computes them is still running."""

import gc

import pytest
import torch
from torch import distributed as dist
from torch import nn

import lmswap
from lmswap.ir import backward_parts
from tests.training import same_bits

events = []


@torch.library.custom_op("lmswap_tests::reported", mutates_args=())
def reported(x: torch.Tensor, name: str) -> torch.Tensor:
    events.append(name)
    return x * 1


@reported.register_fake
def _(x, name):
    return torch.empty_like(x)


def _name(ctx, inputs, output):
    ctx.name = f"backward of {inputs[1]}"


reported.register_autograd(lambda ctx, gradient: (reported(gradient, ctx.name), None), setup_context=_name)


class Net(nn.Module):
    """Layers between which the backward records its position."""

    def __init__(self, depth=3, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(reported(x, f"layer {number}")))
        return x


@pytest.fixture(autouse=True)
def _together(tmp_path, monkeypatch):
    monkeypatch.setattr(backward_parts, "_MIN_BYTES", 1)
    monkeypatch.setattr(backward_parts, "_MAX_PARTS", 100)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    events.clear()
    yield
    dist.destroy_process_group()


def enabled(make=Net, **options):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make()
    lmswap.enable(model, **{"policy": "swap_all", "budget": "1GiB", "min_swap_bytes": 1, **options})
    return model


def plain(make=Net):
    torch.manual_seed(0)
    return make()


def batch(number=0):
    drawn = torch.randn(8, 16, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    return drawn.to(torch.get_default_device())


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("compiler", ["fx", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_layers_gradient_arrives_before_the_next_layers_backward(compiler):
    model = enabled(compiler=compiler)
    for number, layer in enumerate(model.layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: events.append(f"gradient {number}"))
    expected = ["gradient 2", "backward of layer 2", "gradient 1", "backward of layer 1", "gradient 0"]
    for _ in range(5):  # planned again meanwhile
        events.clear()
        model(batch()).sum().backward()
        reported = [event for event in events if event.startswith(("gradient", "backward"))]
        assert reported[-len(expected) :] == expected  # ops are metered before
    lmswap.disable(model)


@pytest.mark.parametrize("policy", ["swap_all", "recompute", "auto"])
def test_every_policy_has_the_bits_of_plain_torch(policy):
    expected, model = plain(), enabled(policy=policy)
    for step in range(6):
        for network in (expected, model):
            network.zero_grad()
            network(batch(step)).square().sum().backward()
        assert same_bits(gradients(model), gradients(expected))
    assert policy != "swap_all" or lmswap.report(model).tier_highest_bytes > 0
    lmswap.disable(model)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["swap_all", "none"])
def test_inductors_backward_in_parts_has_the_bits_of_the_whole(policy, monkeypatch):
    def trained():
        model = enabled(compiler="inductor", policy=policy)
        for step in range(4):
            model.zero_grad()
            model(batch(step)).square().sum().backward()
        moved_bytes = lmswap.report(model).tier_highest_bytes
        lmswap.disable(model)
        return gradients(model), moved_bytes

    in_parts, moved_bytes = trained()
    monkeypatch.setattr(backward_parts, "_MIN_BYTES", 2**40)
    assert same_bits(in_parts, trained()[0])
    assert policy != "swap_all" or moved_bytes > 0


def test_accumulated_gradients_of_retained_graphs_have_plain_bits():
    expected, model = plain(), enabled()
    for network in (expected, model):
        for step in range(3):
            loss = network(batch(step)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert same_bits(gradients(model), gradients(expected))
    lmswap.disable(model)


def test_gradients_of_some_parameters_and_of_an_input_have_plain_bits():
    def some(network):
        x = batch().requires_grad_()
        loss = network(x).square().sum()
        first, last = network.layers[0].weight, network.layers[-1].bias
        found = torch.autograd.grad(loss, [last, x], retain_graph=True)
        return [*found, *torch.autograd.grad(loss, [first])]

    expected, model = some(plain()), enabled()
    for _ in range(3):
        assert same_bits(some(model), expected)
    lmswap.disable(model)


def test_a_hook_may_change_a_gradient_in_place_and_use_the_model():
    def trained(network):
        def changes(parameter):
            parameter.grad.mul_(2)
            with torch.no_grad():
                network(batch(9).to(parameter.device))

        for layer in network.layers:
            layer.weight.register_post_accumulate_grad_hook(changes)
        for step in range(4):
            network.zero_grad()
            network(batch(step)).square().sum().backward()
        return gradients(network)

    expected, model = trained(plain()), enabled()
    assert same_bits(trained(model), expected)
    lmswap.disable(model)


class Shared(nn.Module):
    """Gradients that are one tensor, views of one tensor, what came in, or that later ops read."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 16)) for _ in range(3))
        self.bias, self.both = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        y = torch.cat([self.a, self.b]) @ torch.tanh(self.both) + self.bias
        return (y[:8] + self.c + x) * self.a, self.c


def trebles(parameter):
    parameter.grad.mul_(3)


def test_gradients_that_share_memory_have_plain_bits_when_hooks_write_them():
    def trained(network):
        for parameter in network.parameters():
            parameter.register_post_accumulate_grad_hook(trebles)
        for step in range(4):
            network.zero_grad()
            y, c = network(batch(step))
            (y.square().sum() + c.sum()).backward()
        return gradients(network)

    expected, model = trained(plain(Shared)), enabled(Shared)
    assert same_bits(trained(model), expected)
    lmswap.disable(model)


def test_the_step_after_a_failed_backward_hook_has_plain_bits():
    expected, model = plain(), enabled()
    failing = [True]

    def fails(_):
        if failing[0]:
            raise RuntimeError("the hook failed")

    for step in range(4):
        model.zero_grad()
        handle = model.layers[1].weight.register_hook(fails)
        loss = model(batch(step)).square().sum()
        with pytest.raises(RuntimeError, match="the hook failed"):
            loss.backward()
        handle.remove()
        for network in (expected, model):
            network.zero_grad()
            network(batch(step)).square().sum().backward()
        assert same_bits(gradients(model), gradients(expected))
    del loss
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)


def test_overwritten_results_of_an_earlier_graph_get_plain_gradients():
    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            x.tanh_()
            return self.last(x), x

    def trained(network):
        for step in range(4):
            network.zero_grad()
            y, x = network(batch(step))
            (y.square().sum() + x.sum()).backward()
        return gradients(network)

    expected, model = trained(plain(Overwriting)), enabled(Overwriting)
    assert same_bits(trained(model), expected)
    lmswap.disable(model)
