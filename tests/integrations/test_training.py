"""The common part of the callbacks, without the trainers' libraries."""

import pytest
from torch import nn

import lmswap
from lmswap.errors import OptionError
from lmswap.integrations.training import ManagedTraining


def test_the_callback_refuses_unreadable_arguments_when_constructed():
    with pytest.raises(OptionError, match="unknown option 'bugdet'"):
        ManagedTraining("auto", {"bugdet": "6GiB"})
    with pytest.raises(OptionError, match="unknown policy 'fast'"):
        ManagedTraining("6GiB", {"policy": "fast"})


def test_only_a_finished_training_logs_its_report(caplog):
    caplog.set_level("INFO", logger="lmswap.integrations")
    training = ManagedTraining("1GiB", {})
    training.begin(nn.Linear(2, 2))
    training.end()
    training.end()
    training.begin(nn.Bilinear(2, 2, 2))
    training.abandon()
    assert [record.message.partition(" on ")[0] for record in caplog.records] == ["lmswap report: Linear"]
    assert training.report().model == "Linear"


def test_a_training_restarted_before_its_end_leaves_no_model_enabled(enabled):
    training = ManagedTraining("1GiB", {})
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    training.begin(first)
    training.begin(second)
    training.end()
    assert not enabled()


def test_a_model_that_is_enabled_already_stays_so_and_is_reported():
    model = lmswap.enable(nn.Linear(2, 2), "1GiB")
    training = ManagedTraining("auto", {})
    training.begin(model)
    training.end()
    assert training.report().budget_bytes == lmswap.report(model).budget_bytes == 2**30
    with pytest.raises(OptionError, match=r"Linear is enabled already: leave out arguments here \(budget, wipe\), or"):
        ManagedTraining("2GiB", {"wipe": True}).begin(model)
    lmswap.disable(model)


def test_the_device_is_passed_through():
    training = ManagedTraining("1GiB", {"device": "cuda:99"})
    with pytest.raises(OptionError, match=r"device='cuda:99': torch can use \d GPUs here"):
        training.begin(nn.Linear(2, 2, device="cpu"))
