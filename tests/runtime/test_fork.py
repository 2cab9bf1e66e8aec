"""A forked child: it has the model, but neither the threads nor the files that moved its tensors."""

import os
import signal
import sys
import traceback

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lmswap
from lmswap.errors import ForkedProcess, TransferError
from tests.both_paths import PATHS, Net, batch, steps, swapping

pytestmark = [pytest.mark.parametrize("path", PATHS), pytest.mark.timeout(120)]


def in_child(act):
    """Runs ``act`` in a fork, which then exits as interpreters do; fails if it raised or hung."""
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.alarm(60)
        torch.set_num_threads(1)  # threads of OpenMP do not survive a fork either
        try:
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            lmswap.api._close_all()  # as at the interpreter's exit
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def trained(path):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = swapping(Net(), path, wipe=True)
    model(batch()).square().mean().backward()
    return model


def test_a_child_is_refused_and_its_parent_continues(path, device):
    model, data = trained(path), batch()
    torch.manual_seed(1)
    loss = model(data).square().mean()

    def act():
        for use in (lambda: model(data), lambda: lmswap.report(model), lambda: lmswap.explain(model)):
            with pytest.raises(ForkedProcess, match=r"forked from one in which Net was enabled.*enable\(model, budget"):
                use()
        with torch.no_grad(), pytest.raises(ForkedProcess):
            model(data)
        if device.type == "cpu":  # a GPU's backward runs in a thread of autograd's, which a fork does not have
            with pytest.raises(TransferError, match="stayed with the process"):
                loss.backward()

    in_child(act)
    loss.backward()  # what left before the fork has not been wiped
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    lmswap.disable(model)
    model.zero_grad()
    model.load_state_dict(model.state_dict())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert len(steps(model)) > 0


def test_tensors_swapped_before_a_fork_are_restored_unchanged(path):
    data = [batch() for _ in range(2)]

    def gradients(model, meanwhile):
        losses = [model(inputs).square().mean() for inputs in data]
        meanwhile(model)
        for loss in losses:
            loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    expected = gradients(Net(), lambda _: None)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = swapping(Net(), path, wipe=True)
    actual = gradients(model, lambda model: in_child(lambda: lmswap.disable(model)))
    assert all(map(torch.equal, actual, expected))
    assert lmswap.report(model).tier_peak_bytes > 0
    lmswap.disable(model)


@pytest.mark.cpu_only("a forked child cannot use CUDA")
def test_a_child_can_run_the_model_plainly_or_enable_it_again(path):
    model = trained(path)

    def act():
        torch.manual_seed(2)
        lmswap.disable(model)
        model.zero_grad()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        expected = steps(model)
        model.load_state_dict(state)
        torch.manual_seed(2)
        swapping(model, path)
        assert all(map(torch.equal, steps(model), expected))
        assert lmswap.report(model).swapped_out_bytes > 0
        lmswap.disable(model)

    in_child(act)
    model(batch()).square().mean().backward()
    assert lmswap.report(model).swapped_out_bytes > 0
    lmswap.disable(model)


def test_a_child_leaves_the_memory_of_a_gpus_steps_to_its_parent(path, device):
    torch.compiler.reset()
    model = swapping(nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), path)
    data = torch.randn(2048, 512)
    for _ in range(2):
        model(data).square().mean().backward()
        model.zero_grad(set_to_none=True)  # or gradients would hold that memory
    if (device.type, path) == ("cuda", "fx"):
        assert lmswap.api._sessions[model].engine.arena.reserved_bytes > 0
    for act in (lambda: None, lambda: lmswap.disable(model)):
        in_child(act)
    lmswap.disable(model)


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((3, 16, 16), float(index), device="cpu")  # a forked worker cannot use CUDA


def test_forked_workers_of_a_data_loader_serve_a_model_that_is_enabled(path, device):
    model = trained(path)
    for images in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        model(images.to(device)).square().mean().backward()
    assert lmswap.report(model).steps == 3
    lmswap.disable(model)
