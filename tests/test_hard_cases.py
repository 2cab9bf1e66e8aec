"""Difficult training loops, on both paths: captured graphs and saved-tensor hooks.

Each case is a loop over an ordinary model; it must give the bits of torch without lmswap, with everything swapped.
"""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap.errors import DoubleBackward, OptionError
from tests.both_paths import PATHS, Break, EagerInside, Net, batch, steps, swapping

pytestmark = pytest.mark.parametrize("path", PATHS)


def check(make_model, path, drive=steps, *, is_compiled_otherwise=False):
    """Runs ``drive`` with and without lmswap; the bits are equal, bytes were moved, and none stay behind.

    Graphs of some ops give other bits than torch itself: then the same graphs without swapping are the measure.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    model = make_model()
    expected = drive(lmswap.enable(model, compiler=path, policy="none") if is_compiled_otherwise else model)
    lmswap.disable(model)
    torch.manual_seed(0)
    model = swapping(make_model(), path)
    try:
        actual = drive(model)
        gc.collect()
        gc.collect()  # what torch makes for second derivatives are classes in cycles, whose graphs go a round later
        report = lmswap.report(model)
        assert len(actual) == len(expected) > 0
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
        assert report.tier_used_bytes == 0
        assert report.tier_peak_bytes > 0
        return report
    finally:
        lmswap.disable(model)


def test_plain_steps(path):
    report = check(Net, path)
    assert report.swapped_out_bytes > 0
    assert report.swapped_in_bytes == report.swapped_out_bytes
    assert report.steps == 3


def test_a_graph_break_inside(path):
    assert check(lambda: Net(Break()), path).swapped_out_bytes > 0


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y + 0 * x * ctx.saved_tensors[0]


class Custom(nn.Module):
    def forward(self, x):
        return Scale.apply(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # what torch's tracer does to it
def test_a_custom_autograd_function(path):
    assert check(lambda: Net(Custom()), path).swapped_out_bytes > 0


class TensorHooks(nn.Module):
    def forward(self, x):
        y = torch.tanh(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 2)
        return y * x


def test_hooks_on_tensors_and_modules(path):
    def make():
        model = Net(TensorHooks())
        model.first.register_forward_hook(lambda module, args, output: output * 1.5)
        model.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model.second.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 0.5,))
        model.head.weight.register_hook(lambda grad: grad * 3)
        return model

    check(make, path)


class Branches(nn.Module):
    def forward(self, x):
        if x.mean() > 0:
            return torch.tanh(x) * x
        return x.sigmoid().exp() + x.square()


def test_control_flow_that_depends_on_data(path):
    report = check(lambda: Net(Branches()), path, lambda model: steps(model, 6))
    assert report.steps >= 5


def test_one_step_over_and_over_takes_each_branch_with_a_plan(path):
    signs = iter([1, 1, -1, 1, -1, 1, -1, -1, 1] * 2)

    class Alternating(nn.Module):
        def forward(self, x):
            return x.sigmoid().exp() * x if self.sign > 0 else torch.tanh(x)

    middle = Alternating()

    def run(model, data):
        middle.sign = next(signs)
        return model(data).square().mean()

    check(lambda: Net(middle), path, lambda model: steps(model, 9, run=run))


def test_backward_twice_with_retain_graph(path):
    def run(model, data):
        loss = model(data).square().mean()
        loss.backward(retain_graph=True)
        return loss

    check(Net, path, lambda model: steps(model, run=run))


def test_backward_twice_without_retain_graph_is_torchs_own_error(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    for _ in range(3):
        loss = model(batch()).square().mean()
        loss.backward()
        with pytest.raises(RuntimeError, match=r"second time|backward through"):
            loss.backward()
    lmswap.disable(model)


def test_double_backward(path):
    def run(model, data):
        data.requires_grad_()
        output = model(data).square().mean()
        (grad,) = torch.autograd.grad(output, data, create_graph=True)
        return output + grad.square().mean()

    report = check(Net, path, lambda model: steps(model, run=served_from_the_second_step(run, path)))
    assert any("differentiated once more" in note for note in report.notes) == (path == "fx")


def served_from_the_second_step(run, path):
    """``run``, whose first step captured graphs refuse in a clear sentence; what it left behind is taken back."""
    refused = []

    def again(model, data):
        if path == "fx" and not refused and model._compiled_call_impl is not None:
            before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
            with pytest.raises(DoubleBackward, match="take the step again"):
                run(model, data.clone()).backward()
            refused.append(True)
            model.zero_grad()
            model.load_state_dict(before)
            torch.set_rng_state(state)
        return run(model, data)

    return again


def test_gradients_that_could_be_differentiated_but_are_not_are_no_error(path):
    def run(model, data):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(model(data).square().mean(), parameters, create_graph=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach()

    check(Net, path, lambda model: steps(model, run=run))


def test_a_model_that_must_keep_its_graphs_is_refused_with_an_alternative(path):
    if path == "eager":
        pytest.skip("has no graphs")
    torch.compiler.reset()
    model = lmswap.enable(Net(), policy="recompute", min_swap_bytes=2048)
    for _ in range(2):
        data = batch().requires_grad_()
        (grad,) = torch.autograd.grad(model(data).square().mean(), data, create_graph=True)
        with pytest.raises(DoubleBackward, match='compiler="eager", policy="auto"'):
            grad.square().mean().backward()
    lmswap.disable(model)


def test_a_model_that_differentiates_in_its_own_forward(path):
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.net(x).sum()
            (forces,) = torch.autograd.grad(energy, x, create_graph=True)
            return forces

    run = served_from_the_second_step(lambda model, data: model(data).square().mean(), path)

    def drive(model):
        return steps(model, run=run, make=lambda: torch.randn(64, 16))

    assert any("inside of the forward" in note for note in check(Forces, path, drive).notes)


class TwoHeads(Net):
    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)))
        return {"a": torch.tanh(self.second(h)).exp(), "b": (h * h).sigmoid(), "c": None}, (h.mean(), None)


def test_partial_backward_and_nested_outputs(path):
    def run(model, data):
        outputs, (mean, _) = model(data)
        assert outputs["c"] is None
        weights = [model.first.weight, model.first.bias]
        (outputs["a"].sum() * 0).backward(retain_graph=True)
        grads = torch.autograd.grad(outputs["b"].square().sum(), weights, retain_graph=True)
        return outputs["a"].square().mean() + mean + sum(grad.sum() for grad in grads)

    check(TwoHeads, path, lambda model: steps(model, run=run))


def test_only_some_outputs_are_ever_used(path):
    check(TwoHeads, path, lambda model: steps(model, run=lambda model, data: model(data)[0]["b"].square().mean()))


def test_forwards_without_backward(path):
    def run(model, data):
        model(batch())
        with torch.no_grad():
            model(batch())
        model.eval()
        model(batch())
        with torch.inference_mode():
            model(batch())
        model.train()
        return model(data).square().mean()

    check(Net, path, lambda model: steps(model, run=run))


class Failing(nn.Module):
    """Raises in its forward, or in the backward through it, when its flag is set."""

    def __init__(self):
        super().__init__()
        self.fails_in, self.error = "", ZeroDivisionError

    def forward(self, x):
        if self.fails_in == "forward":
            raise self.error
        y = torch.tanh(x)
        y.register_hook(self._check)
        return y

    def _check(self, grad):
        if self.fails_in == "backward":
            raise self.error
        return grad


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_errors_in_mid_step_and_training_on(path, error):
    def run(model, data):
        # Batch norm has counted those steps with and without lmswap.
        for where in ("forward", "backward"):
            model.middle.fails_in, model.middle.error = where, error
            with pytest.raises(error):
                model(data).square().mean().backward()
            model.zero_grad()
        model.middle.fails_in = ""
        return model(data).square().mean()

    check(lambda: Net(Failing()), path, lambda model: steps(model, run=run))


def test_gradients_are_accumulated_over_steps_and_over_losses(path):
    def run(model, data):
        model(data).square().mean().backward()
        first, second = model(batch()).square().mean(), model(batch()).mean()
        second.backward()
        first.backward()
        return model(data).mean() + model(batch()).square().mean()

    check(Net, path, lambda model: steps(model, run=run))


class Mixed(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = torch.tanh(x.float())
            with torch.autocast("cpu", torch.bfloat16):
                return torch.tanh(y @ y.t()).exp().mean() * x


def test_nested_autocast_and_a_gradient_scaler(path):
    def drive(model):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(64, 32)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return found

    check(lambda: nn.Sequential(nn.Linear(32, 64), nn.Tanh(), Mixed(), nn.Linear(64, 8)), path, drive)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_of_the_model(path, use_reentrant):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.2), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, torch.tanh(x), use_reentrant=use_reentrant)

    report = check(lambda: Net(Saving()), path)
    is_served_by_hooks = any("path: saved-tensor hooks" in note for note in report.notes)
    assert is_served_by_hooks == (path == "eager")


class Attending(nn.Module):
    """Draws in ops with one result and in one with several."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        mixed = nn.functional.rrelu(nn.functional.alpha_dropout(mixed, 0.1, training=True), training=True)
        return x + (mixed + torch.rand_like(mixed) * mixed).transpose(1, 2).unflatten(2, x.shape[2:])


def test_random_ops_of_a_checkpoint_inside_of_the_model_run_once(path):
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attending()

        def forward(self, x):
            return checkpoint(self.inner, torch.tanh(x), use_reentrant=False)

    check(lambda: Net(Saving()), path)


def test_shared_and_frozen_parameters(path):
    def make():
        model = Net(nn.Conv2d(8, 8, 3, padding=1))
        model.middle.weight = model.second.weight
        model.first.weight.requires_grad_(False)
        return model

    check(make, path)


def test_several_models_at_once(path):
    torch.compiler.reset()

    def drive(models):
        found = []
        for _ in range(3):
            data = batch()
            losses = [model(data).square().mean() for model in models]
            sum(losses).backward()
            for model in models:
                found += [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
        return found

    torch.manual_seed(0)
    models = [Net(), Net(nn.Tanh())]
    swapped = [swapping(copy.deepcopy(model), path) for model in models]
    torch.manual_seed(1)
    expected = drive(models)
    torch.manual_seed(1)
    actual = drive(swapped)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for model in swapped:
        assert lmswap.report(model).swapped_out_bytes > 0
        lmswap.disable(model)


def test_models_in_several_threads(path):
    torch.compiler.reset()
    torch.manual_seed(0)
    data = batch()
    models = [Net() for _ in range(2)]

    def train(model, found):
        for _ in range(4):
            model(data).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters()]

    expected, actual = [], []
    for model in models:
        found = []
        train(copy.deepcopy(model), found)
        expected.append(found)
    threads = []
    for model in models:
        swapping(model, path)
        model(data).square().mean().backward()  # torch compiles in one thread at a time
        model.zero_grad()
        model.load_state_dict(model.state_dict())
        actual.append([])
        threads.append(threading.Thread(target=train, args=(model, actual[-1])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model, found, wanted in zip(models, actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert lmswap.report(model).swapped_out_bytes > 0
        lmswap.disable(model)


def test_copies_and_saved_states(path):
    def run(model, data):
        loss = model(data).square().mean()
        loss.backward()
        copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = (*copies, torch.load(file, weights_only=False))
        for other in copies:
            assert other._compiled_call_impl is None
            assert list(other.state_dict()) == list(model.state_dict())
        model.load_state_dict(copies[-1].state_dict())
        return model(data).square().mean()

    check(Net, path, lambda model: steps(model, run=run))


def test_sizes_that_change(path):
    sizes = iter([(8, 16), (4, 16), (8, 12)] * 6)  # hooks follow a plan for a size in its third step
    report = check(Net, path, lambda model: steps(model, 9, make=lambda: batch(*next(sizes))))
    assert report.swapped_out_bytes > 0


class Wide(nn.Module):
    """Needs much memory for a moment, when a step has saved nothing yet."""

    def forward(self, x):
        return x + (x.repeat(1, 6) + 1).sum(1, keepdim=True) / 1000


@pytest.mark.slow
@pytest.mark.cpu_only("its budgets are of what tensors hold; on a GPU they are of what is reserved")
def test_two_forwards_before_a_backward_keep_the_budget_or_are_reported(path):
    def drive(model, numbers):
        for losses in numbers:
            for loss in [model(data * number).square().mean() for number in losses]:
                loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Wide(), *[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    model, data = copy.deepcopy(plain), torch.randn(2**16, 64)  # 16 MiB, as each activation
    numbers = ((1,), (2, 3), (4, 5), (6,), (7, 8), (9,))
    expected = drive(plain, numbers)
    lmswap.enable(model, budget="320MiB" if path == "eager" else "448MiB", policy="swap", compiler=path)
    assert all(map(torch.equal, drive(model, numbers), expected))
    report = lmswap.report(model)
    said = " ".join(report.notes)
    if path == "eager":
        assert report.measured_peak_bytes <= report.budget_bytes
        assert "before the backward of an earlier one had ended" in said
    else:
        assert "in another order than planned for: the step may exceed the budget" in said
    lmswap.disable(model)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks(path, kind):
    def make():
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), kind(32, 32, 2, batch_first=True))

    def run(model, data):
        output, _ = model(data)
        return output.square().mean()

    report = check(make, path, lambda model: steps(model, 3, run=run, make=lambda: torch.randn(4, 12, 16)))
    said = " ".join(report.notes)
    assert ("captured no part" in said) == (path == "fx")
    assert ("LSTM" in said) == (path == "fx")  # torch's reason names both kinds


def test_sparse_gradients(path):
    def make():
        return nn.Sequential(nn.Embedding(100, 32, sparse=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def drive(model):
        found = []
        for _ in range(4):
            model(torch.randint(0, 100, (16, 8))).square().mean().backward()
            found += [p.grad.to_dense().clone() for p in model.parameters()]
            model.zero_grad()
        return found

    check(make, path, drive)


def test_complex_tensors(path):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(33, dtype=torch.cfloat))

        def forward(self, x):
            spectrum = torch.fft.rfft(torch.tanh(x)) * self.weight
            return torch.fft.irfft((spectrum * spectrum.conj()).sqrt() + spectrum.conj().sin() * 1e-3).tanh()

    check(Spectral, path, lambda model: steps(model, make=lambda: torch.randn(32, 64)), is_compiled_otherwise=True)


class Views(nn.Module):
    """One storage saved through views that a key of address, shape and sum of strides would confuse."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        left, right = h[:, :16], h[:, 16:]
        turned = h.t()
        wide = h.as_strided((32, 16), (32, 2), 1)
        mixed = left * right + right.exp() * wide + (turned @ h)[:, :16]
        return mixed * h.flip(0)[:, ::2] + h.unsqueeze(0).expand(3, -1, -1).square().sum(0)[:, :16]


def test_views_of_one_storage(path):
    report = check(Views, path, lambda model: steps(model, make=lambda: torch.randn(32, 32)))
    assert report.swapped_out_bytes > 0


class Rewritten(nn.Module):
    """Saves a storage, writes it, and saves it again; the gradient that needs the first bytes is never computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        h = self.linear(x)
        unused = h.sin()
        h.mul_(2.0)
        return (h.tanh() * h).sigmoid(), unused


def test_a_storage_written_between_two_saves_is_restored_as_last_saved(path):
    def run(model, data):
        # No backward reads what the sine saved: the 4 KiB stay in the tier for as long as `_unused` lives.
        output, _unused = model(data)
        return output.square().mean()

    check(Rewritten, path, lambda model: steps(model, run=run, make=lambda: torch.randn(32, 32)))


def test_a_saved_tensor_changed_in_place_is_refused(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    for size in (2048, 2**20):  # swapped, and kept where it is
        lmswap.enable(model, compiler=path, policy="swap_all", min_swap_bytes=size)
        for _ in range(3):
            loss = model(batch()).square().mean()
            with torch.no_grad():
                model.second.weight.mul_(1.0)
            with pytest.raises(RuntimeError, match=r"in.?place"):
                loss.backward()
            model(batch()).square().mean().backward()
    lmswap.disable(model)


def test_saved_tensor_hooks_around_the_model_are_refused(path):
    model = swapping(Net(), path)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(lmswap.errors.CaptureError, match="hooks surround"):
        model(batch())
    check(Net, path)
    lmswap.disable(model)


def test_policies_that_recompute_need_graphs(path):
    if path == "eager":
        with pytest.raises(OptionError, match="needs graphs"):
            lmswap.enable(Net(), compiler="eager", policy="recompute")
    else:
        model = lmswap.enable(Net(EagerInside()), policy="recompute", min_swap_bytes=2048)
        model(batch()).square().mean().backward()
        assert any(note.startswith("path: saved-tensor hooks") for note in lmswap.report(model).notes)
        with pytest.raises(OptionError, match="needs graphs"):
            model(batch())
        lmswap.disable(model)


def test_modules_that_torch_compile_skips_are_swapped_and_named(path):
    report = check(lambda: Net(EagerInside()), path)
    assert report.swapped_out_bytes > 0
    (note,) = [note for note in report.notes if note.startswith("path:")]
    assert ("as requested" if path == "eager" else "large tensors were saved outside") in note
    if path == "fx":
        assert "both_paths.py:" in note


def test_a_model_that_cannot_be_captured_is_swapped_from_the_first_step(path):
    class Alone(Net):
        forward = torch._dynamo.disable(Net.forward)

    report = check(Alone, path, lambda model: steps(model, 3))
    assert report.swapped_out_bytes > 0
    assert any("captured no part" in note for note in report.notes) == (path == "fx")
