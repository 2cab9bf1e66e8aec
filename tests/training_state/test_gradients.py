"""Gradients are non-resident from their computation to the update, and results are those of plain torch."""

import functools
import gc
import time

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import TransferError
from lmswap.hardware.measure import describe_machine
from lmswap.runtime import _C
from lmswap.runtime.host_copies import HostCopies
from tests.training import session_of
from tests.training_state.test_streaming import LAYERS, WIDTH, all_tensors, large, made, same
from tests.training_state.test_trained_weights import enabled


def streaming(model, optimizer):
    enabled(model, optimizer)
    state = session_of(model).updates
    state.stream_state(state.state_bytes)
    state.gradients.stream()


def non_resident_gradients(model):
    find = session_of(model).engine.host_copies.find
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [each for each in gradients if find(each.untyped_storage()) is not None]


def train(model, optimizer, steps=4, *, backwards=1, set_to_none=True, before_update=lambda: None):
    """Return losses, and gradients as they are before each update."""
    seen = []
    for step in range(steps):
        torch.manual_seed(step)
        for _ in range(backwards):
            loss = model(torch.randn(4, WIDTH))
            loss.backward()
            seen.append(loss.detach())
        before_update()
        seen += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "sgd foreach", "adam fused"])
def test_accumulated_gradients_have_plain_bits(name, backwards, set_to_none):
    given = {"backwards": backwards, "set_to_none": set_to_none}
    plain, plain_optimizer = made(name)
    expected = train(plain, plain_optimizer, **given)
    model, optimizer = made(name)
    streaming(model, optimizer)
    found = train(model, optimizer, **given, before_update=lambda: counts.append(len(non_resident_gradients(model))))
    assert same(found, expected)
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    assert counts == [LAYERS] * 4
    lmswap.disable(model)
    assert same(train(model, optimizer, 1, **given), train(plain, plain_optimizer, 1, **given))


counts: list[int] = []


@pytest.fixture(autouse=True)
def _no_counts():
    counts.clear()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model: [each.grad.data.mul_(0.5) for each in model.parameters() if each.grad is not None],
        lambda model: setattr(model.layers[2].weight, "grad", torch.ones(WIDTH, WIDTH)),
        lambda model: setattr(model.layers[2].weight, "grad", None),
        lambda model: setattr(model.layers[0].weight, "grad", model.layers[2].weight.grad),
    ],
)
def test_gradients_can_be_changed_before_the_update(change):
    def trained(enable):
        model, optimizer = made()
        if enable:
            streaming(model, optimizer)
        seen = train(model, optimizer, backwards=2, before_update=lambda: change(model))
        return [*seen, *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


def clamp(parameter):
    parameter.grad.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("hook", ["before", "after"])
def test_hooks_on_gradients_find_each_in_one_place(hook):
    def trained(enable):
        model, optimizer = made()
        for parameter in model.parameters():
            if hook == "before":
                parameter.register_hook(lambda gradient: gradient * 2)
            else:
                parameter.register_post_accumulate_grad_hook(clamp)
        if enable:
            streaming(model, optimizer)
        return [*train(model, optimizer, backwards=2), *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


def test_a_scaler_that_skips_steps():
    def trained(enable):
        model, optimizer = made("adam fused")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        if enable:
            streaming(model, optimizer)
        for step in range(5):
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, WIDTH)) * (float("inf") if step == 2 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return all_tensors(model, optimizer)

    assert same(trained(enable=True), trained(enable=False))


@pytest.mark.parametrize("name", ["adam fused", "adagrad fused", "sgd"])
def test_a_scaler_whose_update_divides_gradients(name):
    """That of a fused optimizer does, in place, as logs of gradients after the update show."""

    def trained(enable):
        model, optimizer = made(name)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        if enable:
            streaming(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, WIDTH))).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*gradients(model), *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


def test_a_gradient_that_parameters_share_is_fetched_once():
    def trained(enable):
        model, optimizer = made()
        if enable:
            streaming(model, optimizer)
            session_of(model).updates.of_each[0]._max_chunk_bytes = 2**30
        shared = model.layers[0].weight, model.layers[2].weight
        return [
            *train(model, optimizer, before_update=lambda: setattr(shared[0], "grad", shared[1].grad)),
            *all_tensors(model, optimizer),
        ]

    assert same(trained(enable=True), trained(enable=False))


class Sparse(nn.Module):
    """A table with sparse gradients, and layers."""

    def __init__(self):
        super().__init__()
        self.table, self.layers = nn.Embedding(64, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layers(self.table(x)).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        pytest.param(torch.optim.Adagrad, marks=pytest.mark.cpu_only("the emulated GPU does not sort, as it has to")),
    ],
)
def test_sparse_gradients_stay_where_they_are(kind):
    def trained(enable):
        torch.manual_seed(0)
        model, indices, seen = Sparse(), torch.arange(9), []
        optimizer = kind(model.parameters(), lr=0.1)
        model(indices).backward()
        if enable:
            streaming(model, optimizer)
        for _ in range(3):
            model(indices).backward()
            seen += [each.to_dense().clone() for each in gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


class Tied(nn.Module):
    """Two names of one parameter, which is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def test_the_gradient_of_a_parameter_of_two_names_is_copied_once(monkeypatch):
    """A second copy out would read memory that the end of the first has freed."""
    copied = []

    def trained(enable):
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if enable:
            streaming(model, optimizer)
            host_copies = session_of(model).engine.host_copies
            start = host_copies.start_move

            def noting(fetched):
                copied.extend([fetched] * fetched.is_resident)
                start(fetched)

            monkeypatch.setattr(host_copies, "start_move", noting)
        seen = train(model, optimizer, 1, before_update=lambda: counts.append(len(copied)))
        return [*seen, *train(model, optimizer, backwards=2), *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))
    assert counts[0] == 1


def test_gradients_of_some_inputs_only():
    def trained(enable):
        model, optimizer = made()
        if enable:
            streaming(model, optimizer)
        seen = train(model, optimizer, 2)
        weights = [model.layers[0].weight, model.layers[4].weight]
        seen += torch.autograd.grad(model(torch.ones(4, WIDTH)), weights)
        model(torch.ones(4, WIDTH)).backward(inputs=weights)
        seen += [each.grad.clone() for each in weights]
        optimizer.zero_grad()
        return [*seen, *train(model, optimizer, 2), *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


@pytest.mark.cpu_only("numpy cannot hold a GPU's memory")
def test_a_gradient_that_is_held_elsewhere_stays_where_it_is():
    plain, plain_optimizer = made()
    model, optimizer = made()
    streaming(model, optimizer)
    held = []
    for trained, own in ((model, optimizer), (plain, plain_optimizer)):
        weight = trained.layers[2].weight
        hook = weight.register_post_accumulate_grad_hook(lambda each: held.append(each.grad.numpy()))
        train(trained, own, 1)
        hook.remove()
        train(trained, own, 2)
    assert (held[0] == held[1]).all()
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))


class Halving(torch.optim.SGD):
    """Descent by the half of each gradient, which it halves in place."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            parameter.sub_(parameter.grad.mul_(0.5))


@pytest.mark.parametrize("sharing", [(0, 2), (0, 2, 4), (0, 6)])
def test_a_gradient_of_several_parts_of_an_update_has_the_changes_of_all(sharing, monkeypatch):
    start = HostCopies.start_move

    def start_and_wait(self, fetched):
        start(self, fetched)
        time.sleep(0.005)  # until the bytes have left

    monkeypatch.setattr(HostCopies, "start_move", start_and_wait)

    def trained(enable):
        model, _ = made()
        optimizer = Halving([layer.weight for layer in model.layers if isinstance(layer, nn.Linear)], lr=0.1)
        if enable:
            streaming(model, optimizer)
            session_of(model).updates.of_each[0]._max_chunk_bytes = WIDTH * WIDTH * 4
        seen = []
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, WIDTH)).backward()
            for number in sharing[1:]:
                model.layers[number].weight.grad = model.layers[sharing[0]].weight.grad
            optimizer.step()
            seen += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            optimizer.zero_grad()
        return [*seen, *model.parameters()]

    assert same(trained(enable=True), trained(enable=False))


def test_later_gradients_take_over_host_copies(monkeypatch):
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    made_blocks = []
    host_copies = session_of(model).engine.host_copies
    make = host_copies._make
    monkeypatch.setattr(host_copies, "_make", lambda storages: made_blocks.extend(storages) or make(storages))
    train(model, optimizer, 2)
    assert not made_blocks


def test_the_report_predicts_copies_of_gradients_that_are_added_to():
    model, optimizer = made()
    streaming(model, optimizer)
    for backwards in (3, 1):
        train(model, optimizer, 2, backwards=backwards)
        session, report = session_of(model), lmswap.report(model)
        out_bytes, in_bytes = session.streaming.copied_bytes(session.current_step())
        more_bytes = (in_bytes - out_bytes) - (report.state_in_bytes - report.state_out_bytes)
        assert abs(more_bytes) <= model.unused.nbytes, backwards  # whose gradient never comes


def test_disabling_frees_host_copies_of_gradients(no_garbage):
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    model(torch.ones(4, WIDTH)).backward()
    kept = [each.grad for each in model.parameters() if each.grad is not None]
    expected = [each.clone() for each in kept]
    assert len(non_resident_gradients(model)) == LAYERS
    find = session_of(model).engine.host_copies.find
    lmswap.disable(model)
    gc.collect()
    assert not any(find(each.untyped_storage()) for each in kept)
    assert same(kept, expected)


@pytest.mark.cpu_only("faults of a disk")
@pytest.mark.parametrize("fault", ["write@33=fail", "write@36=fail", "read@34=fail", "read@41=fail"])
def test_a_copy_that_fails_loses_no_gradient(fault, monkeypatch):
    """Each is that before the backward, or that after it, and the step can be taken again."""
    describe_machine(torch.device("cpu"), "disk")  # measured while the disk is sound
    monkeypatch.setattr("lmswap.session.engine_setup._C.Engine", functools.partial(_C.Engine, faults=fault))
    plain, plain_optimizer = made("sgd")
    model, optimizer = made("sgd")
    streaming(model, optimizer)
    before, after, failed = gradients(plain), [], None
    for step in range(20):
        torch.manual_seed(step // 2)
        inputs = torch.randn(4, WIDTH)
        before = [each.clone() for each in gradients(plain)]
        plain(inputs).backward()
        after = gradients(plain)
        try:
            model(inputs).backward()
        except TransferError as error:
            failed = error
            break
    assert failed is not None
    for found, old, new in zip(gradients(model), before or [None] * len(after), after, strict=True):
        assert torch.equal(found, new) or (old is not None and torch.equal(found, old))
    optimizer.zero_grad()
    plain_optimizer.zero_grad()
    assert same(train(model, optimizer), train(plain, plain_optimizer))
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))


def gradients(model):
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.cpu_only("growth of a process")
@pytest.mark.parametrize("batch", [8, 512])
def test_the_predicted_peak_is_that_of_a_step_or_its_update(batch, resident):
    """Gradients that a loop keeps count in both, what the update takes in one: they are not in use at once."""
    model, optimizer = large()
    enabled(model, optimizer, min_swap_bytes="1MiB")
    session_of(model).updates.stream_state(session_of(model).updates.state_bytes)
    for step in range(12):
        torch.manual_seed(step // 2)
        model(torch.randn(batch, 512)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    report = lmswap.report(model)
    assert 0 <= report.predicted_peak_bytes - report.measured_peak_bytes <= 2.25 * 2**20  # of gradients, 16
    lmswap.disable(model)


class Widening(nn.Module):
    """Layers of 4 MiB, and at their end activations of 64 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).repeat(1024, 1).tanh().square().mean()


@pytest.mark.cpu_only("a GPU's gradients stream beside the arena of steps")
def test_gradients_that_stream_take_memory_of_backwards_alone(resident):
    torch.manual_seed(0)
    model = Widening()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep")
    session_of(model).updates.gradients.stream()
    for step in range(4):
        torch.manual_seed(step)
        for _ in range(2):
            model(torch.randn(8, 1024)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = lmswap.report(model)
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= 1.01 * report.measured_peak_bytes
    lmswap.disable(model)
