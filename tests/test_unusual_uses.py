"""Unsupported uses and mistakes of the user end in one sentence that names them."""

import copy
import logging
import os
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lmswap
from lmswap.errors import CaptureError, OptionError
from lmswap.saved_tensors.hooks import Hooks
from tests.both_paths import PATHS, Net, batch, swapping

_LMSWAP = f"{Path(lmswap.__file__).parent}{os.sep}"


def test_torchscript_is_refused():
    scripted = torch.jit.script(nn.Linear(4, 4))
    traced = torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4))
    for module in (scripted, traced):
        with pytest.raises(OptionError, match=r"is TorchScript, .*enable the module that was scripted or traced"):
            lmswap.enable(module)
        module(torch.randn(2, 4))  # and stays as it was


@pytest.mark.parametrize("path", PATHS)
def test_data_parallel_of_one_device_is_served_and_of_several_refused(path, device, monkeypatch):
    torch.compiler.reset()
    model = swapping(nn.DataParallel(Net(), device_ids=[0] if device.type == "cuda" else None), path)
    for _ in range(2):
        model(batch()).square().mean().backward()
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)
    monkeypatch.setattr(model, "device_ids", [0, 1])
    with pytest.raises(OptionError, match="to 2 devices in each call, lmswap manages one"):
        lmswap.enable(model)


@pytest.mark.parametrize("policy", ["swap_all", "recompute"])
@pytest.mark.parametrize(
    "wrong", [torch.randn(4, 5, 16, 16), torch.randn(4, 3, 16, 16, dtype=torch.float64)], ids=["shape", "dtype"]
)
def test_a_models_error_under_tracing_is_raised_unchanged_and_not_logged(wrong, policy, caplog):
    torch.compiler.reset()
    plain = Net()
    with pytest.raises(RuntimeError) as expected:
        plain(wrong)
    model = lmswap.enable(plain, policy=policy, min_swap_bytes=2048)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model(wrong)
        assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))
        assert caught.value.__context__ is None
        frames, plainly = (traceback.extract_tb(raised.value.__traceback__) for raised in (caught, expected))
        assert len(frames) <= 2 + len(plainly)
        assert [frame.name for frame in frames if "/_functorch/" in frame.filename] == []
        assert [frame.name for frame in frames if frame.filename.startswith(_LMSWAP)] == ["__call__"]
        model(batch()).square().mean().backward()
    assert not any("path:" in note for note in lmswap.report(model).notes)
    lmswap.disable(model)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@torch.library.custom_op("lmswap_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x):
    raise RuntimeError("its shape is known by running only")


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class Cubed(nn.Module):
    def forward(self, x):
        return cube(torch.tanh(x))


def test_a_model_that_fails_only_under_tracing_is_served_by_hooks():
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, data = Net(Cubed()), batch()
    model = Net(Cubed())
    model.load_state_dict(plain.state_dict())
    swapping(model, "fx")
    for _ in range(3):
        for each in (plain, model):
            each(data).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    report = lmswap.report(model)
    assert report.swapped_out_bytes > 0
    (note,) = [note for note in report.notes if note.startswith("path:")]
    assert "RuntimeError when making fake tensor call" in note
    lmswap.disable(model)


class Picky(nn.Module):
    """Refuses small batches, as code does that checks its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)).exp()
        if len(x) < 8:
            raise ValueError("batch too small")
        return self.second(hidden)


@pytest.mark.parametrize("policy", ["swap_all", "recompute"])
def test_a_model_keeps_its_graphs_after_an_error_of_its_code(policy):
    def drive(model):
        found = []
        for size in (64, 64, 4, 64, 32, 4, 64):
            try:
                loss = model(torch.randn(size, 64)).square().mean()
            except ValueError as error:
                found.append(torch.tensor(len(str(error))))
                continue
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return found

    torch.compiler.reset()
    torch.manual_seed(0)
    expected = drive(Picky())
    torch.manual_seed(0)
    model = lmswap.enable(Picky(), policy=policy, min_swap_bytes=2048)
    assert all(map(torch.equal, drive(model), expected))
    report = lmswap.report(model)
    assert not any("path:" in note for note in report.notes)
    assert report.swapped_out_bytes > 0 or policy == "recompute"
    lmswap.disable(model)


def test_a_model_keeps_its_graphs_after_an_interrupted_trace():
    torch.compiler.reset()
    model = lmswap.enable(Net(), policy="swap_all", min_swap_bytes=2048)
    model(batch()).square().mean().backward()

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.remove()
    model(batch()).square().mean().backward()
    assert not any("path:" in note for note in lmswap.report(model).notes)
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_an_interrupt_at_the_exit_of_hooks_leaves_the_next_call_correct(path, monkeypatch):
    def drive(model):
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    pop_leftovers, is_left = Hooks.pop_leftovers, iter((False, True))  # as the call begins, and as it ends

    def interrupted(hooks):
        if next(is_left):
            raise KeyboardInterrupt
        pop_leftovers(hooks)

    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Net()
    model = swapping(copy.deepcopy(plain), path)
    for _ in range(3):
        drive(model)
    with monkeypatch.context() as patch:
        patch.setattr(Hooks, "pop_leftovers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drive(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert all(map(torch.equal, drive(model), drive(plain)))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_torch_compile_of_an_enabled_model_leaves_it_as_it_is(path):
    def drive(model, call):
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            model.zero_grad()
            call(batch()).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Net()
    expected = drive(plain, plain)
    torch.manual_seed(0)
    model = swapping(Net(), path)
    assert all(map(torch.equal, drive(model, torch.compile(model, backend="aot_eager")), expected))
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)


def test_a_model_and_a_module_inside_of_it_are_not_both_enabled():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    lmswap.enable(model[0])
    with pytest.raises(
        OptionError, match=r"module '0' cannot both be .*: call lmswap\.disable on its module '0' first"
    ):
        lmswap.enable(model)
    lmswap.enable(model[1])  # beside it, another one may be
    lmswap.disable(model[0])
    lmswap.disable(model[1])
    lmswap.enable(model)
    lmswap.enable(model)  # again
    with pytest.raises(
        OptionError, match=r"its module '0\.0' cannot both be .*: call lmswap\.disable on Sequential first"
    ):
        lmswap.enable(model[0][0])
    lmswap.disable(model)


def test_a_checkpoint_around_an_enabled_model_is_named():
    model = lmswap.enable(nn.Linear(8, 8))
    with pytest.raises(CaptureError, match=r"torch\.utils\.checkpoint around it"):
        checkpoint(model, torch.randn(4, 8), use_reentrant=False)
    lmswap.disable(model)
