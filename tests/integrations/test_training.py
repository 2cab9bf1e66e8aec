"""The common part of the callbacks, without the trainers' libraries."""

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining
from tests.training import session_of


def test_the_callback_refuses_unreadable_arguments_when_constructed():
    with pytest.raises(OptionError, match="unknown option 'bugdet'"):
        ManagedTraining("auto", {"bugdet": "6GiB"})
    with pytest.raises(OptionError, match="unknown policy 'fast'"):
        ManagedTraining("6GiB", {"policy": "fast"})
    with pytest.raises(OptionError, match="optimizer must be True, for those of the trainer, or False, not 'adam'"):
        ManagedTraining("6GiB", {"optimizer": "adam"})


def test_only_optimizers_of_the_module_are_managed_with_it():
    modules = [nn.Linear(2, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(module.parameters()) for module in modules[:2]]
    trainings = [ManagedTraining("1GiB", {"optimizer": True}) for _ in modules]
    for training, module, optimizer in zip(trainings, modules, optimizers, strict=False):
        training.begin(module, optimizers)
        assert session_of(module).updates.are_of(optimizer)
    with pytest.raises(OptionError, match="optimizer=True: the trainer has no optimizer that trains Linear"):
        trainings[2].begin(modules[2], optimizers)
    for training in trainings:
        training.abandon()


def test_only_a_finished_training_logs_its_report(caplog):
    caplog.set_level("INFO", logger="lmswap.integrations")
    training = ManagedTraining("1GiB", {})
    training.begin(nn.Linear(2, 2), [])
    training.end()
    training.end()
    training.begin(nn.Bilinear(2, 2, 2), [])
    training.abandon()
    assert [record.message.partition(" on ")[0] for record in caplog.records] == ["lmswap report: Linear"]
    assert training.report().model == "Linear"


def test_a_training_restarted_before_its_end_leaves_no_model_enabled(enabled):
    training = ManagedTraining("1GiB", {})
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    training.begin(first, [])
    training.begin(second, [])
    training.end()
    assert not enabled()


def test_a_model_that_is_enabled_already_stays_so_and_is_reported():
    model = lmswap.enable(nn.Linear(2, 2), "1GiB")
    training = ManagedTraining("auto", {})
    training.begin(model, [])
    training.end()
    assert training.report().budget_bytes == lmswap.report(model).budget_bytes == 2**30
    with pytest.raises(OptionError, match=r"Linear is enabled already: leave out arguments here \(budget, wipe\), or"):
        ManagedTraining("2GiB", {"wipe": True}).begin(model, [])
    lmswap.disable(model)


def test_the_device_of_updates_is_passed_through():
    model = nn.Linear(2, 2, device="cpu")
    training = ManagedTraining("1GiB", {"optimizer": True, "optimizer_device": "cpu"})
    with pytest.raises(OptionError, match="optimizer_device='cpu' is for a model on a GPU"):
        training.begin(model, [torch.optim.SGD(model.parameters())])


def test_the_device_is_passed_through():
    training = ManagedTraining("1GiB", {"device": "cuda:99"})
    with pytest.raises(OptionError, match=r"device='cuda:99': torch can use \d GPUs here"):
        training.begin(nn.Linear(2, 2, device="cpu"), [])
