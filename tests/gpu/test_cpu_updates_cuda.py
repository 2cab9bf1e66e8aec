"""Updates on the CPU of a model on a GPU have the CPU's bits: on the emulated GPU those of training on the CPU."""

import copy
import gc
import itertools
from functools import partial

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError, TierError
from tests.training import session_of
from tests.training_state.interrupted import interrupted_runs
from tests.training_state.test_streaming import OPTIMIZERS, Network, OfAbsent, OfAll, OfEach, all_tensors, groups_of
from tests.training_state.test_streaming import train as train_by

MIB = 2**20
WIDTH = 128
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.usefixtures("deterministic", "no_default_device"),
]
OF_ALL_KINDS = {
    **{name: kind for name, kind in OPTIMIZERS.items() if name != "muon"},
    "adamw tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False),
    "of each": OfEach,
    "of absent": OfAbsent,
}


@pytest.fixture
def no_default_device(device):
    torch.set_default_device(None)


def made(name="adamw", device="cuda", **options):
    torch.manual_seed(0)
    model = Network().to(device)
    return model, OF_ALL_KINDS[name](groups_of(model), **options)


def on_cpu(model, optimizer, budget="1GiB", **options):
    """Enable ``model``, with an update in chunks of a few layers."""
    lmswap.enable(model, budget, optimizer=optimizer, optimizer_device="cpu", **({"min_swap_bytes": 1024} | options))
    session_of(model).updates.of_each[0]._max_chunk_bytes = 3 * WIDTH * WIDTH * 4
    return model, optimizer


def loss_of(model, number):
    torch.manual_seed(number)
    return model(torch.randn(4, WIDTH).to(model.unused.device))


train = partial(train_by, loss_of=loss_of)


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return len(found) > 0 and all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)


def state_of(optimizer):
    return [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]


def are_on_host(model, optimizer):
    find = session_of(model).engine.host_copies.find
    return all(value.device.type == "cpu" or find(value.untyped_storage()) is not None for value in state_of(optimizer))


@pytest.mark.parametrize(
    ("name", "weights"), [*zip(OF_ALL_KINDS, itertools.cycle(["auto", "swap"]), strict=False), ("adamw", "swap")]
)
def test_updates_have_the_bits_of_the_cpu(name, weights):
    plain, plain_optimizer = made(name, "cpu")
    expected = train(plain, plain_optimizer)
    model, optimizer = made(name)
    on_cpu(model, optimizer, weights=weights)
    assert same(train(model, optimizer), expected)
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    assert are_on_host(model, optimizer)
    lmswap.disable(model)
    device_model, device_optimizer = made(name)
    train(device_model, device_optimizer, 1)
    assert {str(value.device) for value in state_of(optimizer)} == {
        str(value.device) for value in state_of(device_optimizer)
    }
    train(model, optimizer, 1)


@pytest.mark.parametrize("schedules_first", [False, True])
@pytest.mark.parametrize("sets_to_none", [False, True])
def test_schedules_clipping_and_accumulation(schedules_first, sets_to_none):
    def run(model, optimizer, enable):
        if not schedules_first:
            enable()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        if schedules_first:
            enable()
        for step in range(8):
            loss_of(model, step).backward()
            if step % 2:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
                optimizer.step()
                optimizer.zero_grad(set_to_none=sets_to_none)
                schedule.step()
        return all_tensors(model, optimizer)

    expected = run(*made(device="cpu"), lambda: None)
    model, optimizer = made()
    assert same(run(model, optimizer, lambda: on_cpu(model, optimizer)), expected)


def test_a_closure_is_called_once_and_hooks_see_one_step():
    def run(model, optimizer):
        calls = []
        optimizer.register_step_pre_hook(
            lambda o, *_: calls.append(("pre", [len(g["params"]) for g in o.param_groups]))
        )
        optimizer.register_step_post_hook(lambda o, *_: calls.append(("post", {*o.state} <= {*model.parameters()})))

        def closure():
            calls.append("closure")
            optimizer.zero_grad()
            loss = loss_of(model, 1)
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        return calls, [*losses, *all_tensors(model, optimizer)]

    model, optimizer = on_cpu(*made())
    (calls, found), (expected_calls, expected) = run(model, optimizer), run(*made(device="cpu"))
    assert calls == expected_calls
    assert same(found, expected)
    lmswap.disable(model)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaling_skips_updates(fused):
    def run(model, optimizer):
        scaler = torch.amp.GradScaler(model.unused.device.type, init_scale=4.0, growth_interval=2)
        for step in range(5):
            scaler.scale(loss_of(model, step) * (float("inf") if step == 2 else 1.0)).backward()
            if not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [torch.tensor(scaler.get_scale()), *all_tensors(model, optimizer)]

    name = "adam fused" if fused else "adamw"
    assert same(run(*on_cpu(*made(name))), run(*made(name, "cpu")))


def test_state_is_saved_loaded_read_and_written():
    def between(optimizer):
        def act(step):
            for values in [*optimizer.state.values()][:3]:
                values["exp_avg"].mul_(0.5)
                values["exp_avg_sq"].data[0] = 0.25

        return act

    plain, plain_optimizer = made(device="cpu")
    train(plain, plain_optimizer, between=between(plain_optimizer))
    saved = copy.deepcopy(plain_optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    expected = train(plain, plain_optimizer, first=4)
    model, optimizer = on_cpu(*made())
    train(model, optimizer, 2, between=between(optimizer))
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    assert are_on_host(model, optimizer)
    assert same(train(model, optimizer, first=4), expected)
    held = copy.deepcopy(optimizer.state_dict())
    other_model, other = made()
    other_model.load_state_dict(model.state_dict())
    on_cpu(other_model, other)
    other.load_state_dict(held)
    assert same(train(other_model, other, first=8), train(plain, plain_optimizer, first=8))


def test_state_that_existed_leaves_the_device():
    plain, plain_optimizer = made(device="cpu")
    train(plain, plain_optimizer)
    model, optimizer = made()
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
    on_cpu(model, optimizer)
    assert len(state_of(optimizer)) > 0
    assert are_on_host(model, optimizer)
    assert same(train(model, optimizer, first=4), train(plain, plain_optimizer, first=4))


def test_parameters_may_be_added_and_frozen_and_written():
    def run(model, optimizer):
        added = optimizer.param_groups[1]["params"].pop()
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": [added], "lr": 0.1})
        model.layers[0].weight.requires_grad_(False)
        model.layers[2].bias.data.mul_(0.5)
        return [*train(model, optimizer, 2, first=2), *all_tensors(model, optimizer)]

    assert same(run(*on_cpu(*made())), run(*made(device="cpu")))


def test_an_update_that_is_interrupted_leaves_all_in_its_place(monkeypatch):
    model, optimizer = on_cpu(*made())
    train(model, optimizer, 2)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    addcdiv, calls = torch.Tensor.addcdiv_, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return addcdiv(*args, **kwargs)

    sizes = [len(group["params"]) for group in optimizer.param_groups]
    state = optimizer.state
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "addcdiv_", failing)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1, first=2)
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert optimizer.state is state
    assert {*state} <= {*model.parameters()}
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert are_on_host(model, optimizer)
    assert not session_of(model).updates.of_each[0]._moved
    optimizer.zero_grad()
    train(model, optimizer, 2, first=3)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [397, pytest.param(7, marks=pytest.mark.slow)])
def test_an_update_that_is_interrupted_anywhere_can_be_repeated(stride):
    model, optimizer = on_cpu(*made())
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 1)
    expected = [tensor.clone() for tensor in all_tensors(model, optimizer)]
    places = [parameter.data_ptr() for parameter in model.parameters()]

    def prepare():
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        loss_of(model, 0).backward()
        return optimizer.step

    for point, _ in interrupted_runs(prepare, stride):
        assert [parameter.data_ptr() for parameter in model.parameters()] == places, point
        assert not session_of(model).updates.of_each[0]._moved
        optimizer.zero_grad()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        train(model, optimizer, 1)
        assert same(all_tensors(model, optimizer), expected), point
        assert are_on_host(model, optimizer)
    lmswap.disable(model)  # an interrupt may be kept somewhere, with the model in its frames


@pytest.mark.parametrize("options", [{"verify": True}, {"compiler": "eager"}])
def test_gradients_that_do_not_stream_are_copied_for_the_update(options):
    model, optimizer = on_cpu(*made(), **options)
    plain, plain_optimizer = made(device="cpu")
    assert same(train(model, optimizer), train(plain, plain_optimizer))
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    assert not session_of(model).updates.gradients.are_streamed


def test_updates_count_as_changes_in_place():
    """By which autograd refuses backwards through parameters that have changed since the forward."""
    model, optimizer = on_cpu(*made())
    before = {parameter: parameter._version for parameter in model.layers.parameters()}
    train(model, optimizer, 1)
    assert all(parameter._version > version for parameter, version in before.items())


def test_gradients_are_what_an_update_leaves():
    def run(model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    kinds = {"nesterov": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True)}
    OF_ALL_KINDS.update(kinds)
    try:
        expected = run(*made("nesterov", "cpu"))
        assert same(run(*on_cpu(*made("nesterov"))), expected)
        assert same(run(*on_cpu(*made("nesterov"), compiler="eager")), expected)
    finally:
        del OF_ALL_KINDS["nesterov"]


class TwoHalves(nn.Module):
    """Parameters that share memory, which their updates access in different chunks."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        both = torch.randn(2 * WIDTH, WIDTH).to(device)
        self.first = nn.Parameter(both[:WIDTH])
        self.between = nn.ParameterList([torch.randn(WIDTH, WIDTH).to(device) for _ in range(4)])
        self.second = nn.Parameter(both[WIDTH:])

    def forward(self, x):
        for weight in (self.first, *self.between, self.second):
            x = torch.tanh(x @ weight)
        return x.square().mean()


def test_parameters_that_share_memory_and_two_optimizers():
    def run(device, enable):
        model = TwoHalves(device)
        model.unused = model.first
        of_first = torch.optim.SGD([model.first, *model.between], lr=0.1, momentum=0.9)
        of_second = torch.optim.AdamW([model.second])
        enable(model, [of_first, of_second])
        for step in range(4):
            loss_of(model, step).backward()
            of_second.step()
            of_first.step()
            of_first.zero_grad()
            of_second.zero_grad()
        return [*model.parameters(), *state_of(of_first), *state_of(of_second)]

    assert same(run("cuda", on_cpu_each), run("cpu", lambda *_: None))


def on_cpu_each(model, optimizers):
    lmswap.enable(model, "1GiB", optimizer=optimizers, optimizer_device="cpu", min_swap_bytes=1024)
    for each in session_of(model).updates.of_each:
        each._max_chunk_bytes = 2 * WIDTH * WIDTH * 4


def large(device):
    torch.manual_seed(0)
    layers = (layer for _ in range(24) for layer in (nn.Linear(512, 512), nn.Tanh()))
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_large(model, optimizer, device, steps=3):
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(64, 512).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def held_bytes():
    """What torch reserves, with the workspaces of cuBLAS."""
    nn.Linear(8, 8).cuda()(torch.randn(8, 8).cuda()).tanh().sum().backward()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_state_of_a_model_that_was_on_the_cpu_follows_it_to_the_device():
    plain, plain_optimizer = made(device="cpu")
    model, optimizer = made(device="cpu")
    train(plain, plain_optimizer, 2)
    train(model, optimizer, 2)
    on_cpu(model, optimizer, device="cuda")
    assert same(train(model, optimizer, 2, first=2), train(plain, plain_optimizer, 2, first=2))
    lmswap.disable(model)
    assert all(value.is_cuda for value in state_of(optimizer) if value.ndim)
    train(model, optimizer, 1)


def test_neither_state_nor_gradients_take_device_memory():
    budget_bytes = held_bytes() + 96 * MIB  # parameters take 24, gradients as much, state 48, and the margin 32
    model, optimizer = large("cuda")
    torch.cuda.reset_peak_memory_stats()
    lmswap.enable(model, budget_bytes, optimizer=optimizer, optimizer_device="cpu")
    found = train_large(model, optimizer, "cuda")
    report = lmswap.report(model)
    assert torch.cuda.max_memory_reserved() <= budget_bytes
    assert report.state_out_bytes == report.state_copied_out_bytes > report.state_in_bytes
    assert report.state_in_bytes == report.state_copied_in_bytes > 24 * MIB
    assert same(found, train_large(*large("cpu"), "cpu"))
    (note,) = (note for note in report.notes if "optimizer_device" in note)
    assert "parameters are updated on the CPU, with its bits, not the GPU's" in note


def test_a_model_larger_than_the_card_is_updated_in_host_memory():
    budget_bytes = held_bytes() + 70 * MIB
    model, optimizer = large("cpu")
    torch.cuda.reset_peak_memory_stats()
    lmswap.enable(model, budget_bytes, device="cuda", optimizer=optimizer, optimizer_device="cpu")
    found = train_large(model, optimizer, "cuda")
    find = session_of(model).engine.host_copies.find
    assert any(find(parameter.untyped_storage()) is not None for parameter in model.parameters())
    assert torch.cuda.max_memory_reserved() <= budget_bytes
    assert same(found, train_large(*large("cpu"), "cpu"))


def test_what_cannot_be_done_is_refused():
    model, optimizer = made()
    with pytest.raises(OptionError, match=r"must be 'cpu', or left out .*, not 'cuda'"):
        lmswap.enable(model, "1GiB", optimizer=optimizer, optimizer_device="cuda")
    with pytest.raises(OptionError, match="needs optimizer="):
        lmswap.enable(model, "1GiB", optimizer_device="cpu")
    with pytest.raises(OptionError, match="needs tier='host', not tier='disk'"):
        lmswap.enable(model, "1GiB", optimizer=optimizer, optimizer_device="cpu", tier="disk")
    with pytest.raises(TierError, match=r"needs 1\.\d+ MiB of host memory .* 1\.00 MiB are available"):
        lmswap.enable(model, "1GiB", optimizer=optimizer, optimizer_device="cpu", host_budget="1MiB")
    with pytest.raises(OptionError, match=r"OfAll cannot run there: .* had other bits"):
        lmswap.enable(model, "1GiB", optimizer=OfAll(model.parameters()), optimizer_device="cpu")
    with pytest.raises(OptionError, match=r"AdamW cannot run there: .* could not be updated"):
        capturable = torch.optim.AdamW(model.parameters(), capturable=True)
        lmswap.enable(model, "1GiB", optimizer=capturable, optimizer_device="cpu")
    assert "step" not in vars(optimizer)
