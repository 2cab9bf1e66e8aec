"""MONAI's trainer with the handler: its plain bits, less memory, figures for its statistics, also in a bundle."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lmswap.errors import OptionError
from tests.integrations.scripts import (
    BATCH,
    BUDGET_BYTES,
    FEW,
    PLAIN_BYTES,
    STATE_BUDGET_BYTES,
    STEPS,
    WIDE,
    Network,
    grown,
    loader,
    scalars,
    streams_within_the_budget,
    weights,
)
from tests.training import same_bits

pytest.importorskip("monai", reason="monai is missing, which make integrations installs")
pytest.importorskip("ignite", reason="pytorch-ignite is missing, which make integrations installs")
import monai
from ignite.engine import Engine, Events
from monai.bundle import ConfigWorkflow
from monai.data import DataLoader, Dataset, MetaTensor
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import StatsHandler, TensorBoardStatsHandler, ValidationHandler, from_engine
from monai.inferers import SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

from lmswap.integrations.monai import LmswapHandler

BUNDLE = Path(__file__).parents[2] / "examples" / "monai_bundle" / "train.json"


def dictionaries(batch):
    for x, y in loader(batch):
        yield {"image": x, "label": y}


def trainer_of(handlers=(), batch=FEW, *, network=None, data=None, criterion=None, size=None, **settings):
    torch.manual_seed(0)
    network = network or Network(**(size or {}))
    return SupervisedTrainer(
        device=torch.device("cpu"),
        **{"max_epochs": 1, **settings},
        train_data_loader=[*dictionaries(batch)] if data is None else data,
        network=network,
        optimizer=torch.optim.AdamW(network.parameters()),
        loss_function=criterion or nn.MSELoss(),
        train_handlers=[*handlers],
        decollate=False,
    )


def trained(handlers=(), **settings):
    trainer = trainer_of(handlers, **settings)
    trainer.run()
    return weights(trainer.network)


def test_bits_are_those_of_plain_monai_and_the_peak_keeps_to_the_budget():
    with grown() as plain:
        expected = trained(batch=BATCH)
    handler = LmswapHandler(BUDGET_BYTES, policy="swap_all")
    with grown() as ours:
        actual = trained([handler], batch=BATCH)

    assert same_bits(actual, expected)
    assert handler.report.highest_peak_bytes <= BUDGET_BYTES < PLAIN_BYTES < plain.nbytes
    assert ours.nbytes < plain.nbytes
    assert handler.report.swapped_out_bytes > PLAIN_BYTES / 2


def test_a_training_state_beyond_the_budget_has_plain_bits(no_garbage):
    settings = {"size": WIDE, "accumulation_steps": 2, "max_epochs": 2}
    handler = LmswapHandler(STATE_BUDGET_BYTES, optimizer=True)
    assert same_bits(trained([handler], **settings), trained(**settings))
    assert streams_within_the_budget(handler.report)


@pytest.mark.parametrize("is_first", [True, False])
def test_tensorboard_has_figures_of_each_epoch_in_any_handler_order(tmp_path, is_first):
    handlers = [LmswapHandler("6GiB"), TensorBoardStatsHandler(log_dir=tmp_path, output_transform=from_engine("loss"))]
    trainer = trainer_of(handlers if is_first else handlers[::-1], max_epochs=2)
    trainer.run()
    found = scalars(tmp_path)
    assert set(found["lmswap/peak_bytes"]) == {1, 2}
    assert set(found["lmswap/budget_bytes"].values()) == {6 * 2**30}
    assert set(handlers[0].report.metrics()) == set(trainer.state.metrics)


def test_volumes_with_metadata_have_plain_bits_despite_validation():
    def volumes():
        torch.manual_seed(1)
        images = [MetaTensor(torch.randn(1, 16, 16, 16), affine=torch.eye(4)) for _ in range(4)]
        data = DataLoader(Dataset([{"image": image, "label": (image > 0.5).float()} for image in images]), batch_size=2)
        torch.manual_seed(0)
        network = UNet(3, 1, 2, channels=(8, 16), strides=(2,), num_res_units=1, norm="batch")
        windows = SlidingWindowInferer((16, 16, 16), 1)
        evaluator = SupervisedEvaluator(torch.device("cpu"), data, network, inferer=windows, decollate=False)
        validation = ValidationHandler(1, evaluator)
        criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        return {"network": network, "data": data, "criterion": criterion, "max_epochs": 2}, validation

    settings, validation = volumes()
    expected = trained([validation], **settings)
    settings, validation = volumes()
    handler = LmswapHandler("6GiB", min_swap_bytes=4096, policy="swap_all")
    assert same_bits(trained([handler, validation], **settings), expected)
    assert handler.report.trains
    assert handler.report.swapped_out_bytes > 0


def test_accumulated_gradients_have_plain_bits():
    settings = {"accumulation_steps": 2, "max_epochs": 2}
    assert same_bits(trained([LmswapHandler("6GiB")], **settings), trained(**settings))


def test_the_network_is_given_back_at_the_end_and_the_report_stays(enabled):
    handler = LmswapHandler("6GiB")
    trainer = trainer_of([handler])
    trainer.run()
    assert not enabled()
    assert trainer.network._compiled_call_impl is None
    assert handler.report.steps == STEPS


def test_a_run_that_is_terminated_disables_the_network(enabled):
    handler = LmswapHandler("6GiB")
    trainer = trainer_of([handler])
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.terminate(skip_completed=True))
    trainer.run()
    assert not enabled()
    assert handler.report.steps == 2


@pytest.mark.parametrize("others", [[], [StatsHandler(output_transform=from_engine("loss"))]], ids=["alone", "first"])
def test_a_run_that_fails_disables_the_network_and_raises(others, enabled):
    def fail():
        assert enabled()
        raise RuntimeError("in the first iteration")

    trainer = trainer_of([LmswapHandler("6GiB"), *others])
    trainer.add_event_handler(Events.ITERATION_COMPLETED, fail)
    with pytest.raises(RuntimeError, match="in the first iteration"):
        trainer.run()
    assert not enabled()


def test_an_evaluator_which_has_no_optimizer_is_managed_too():
    handler = LmswapHandler("6GiB", weights="swap", policy="swap_all", min_swap_bytes=1024)
    data = [*dictionaries(FEW)]
    settings = {"network": Network(), "val_handlers": [handler], "decollate": False}
    SupervisedEvaluator(torch.device("cpu"), data, **settings).run()
    assert handler.report.swapped_in_bytes > 0
    with pytest.raises(OptionError, match="the trainer has no optimizer that trains Network"):
        settings["val_handlers"] = [LmswapHandler("6GiB", optimizer=True)]
        SupervisedEvaluator(torch.device("cpu"), data, **settings).run()


def test_an_engine_without_a_network_is_refused_with_advice():
    engine = Engine(lambda engine, batch: None)
    LmswapHandler("6GiB").attach(engine)
    with pytest.raises(OptionError, match="Engine has no attribute `network`"):
        engine.run([0])


def test_the_example_bundle_has_the_bits_of_the_plain_bundle(tmp_path, capsys):
    def run(**changes):
        monai.utils.set_determinism(None)
        small = {
            "side": 32,
            "volumes": 2,
            "budget": "1GiB",
            "output": str(tmp_path),
            "network_def#channels": [8, 16, 32, 64],
        }
        workflow = ConfigWorkflow(str(BUNDLE), logging_file=False, workflow_type="train", **{**small, **changes})
        workflow.initialize()
        workflow.run()
        return weights(workflow.parser.get_parsed_content("network"))

    run_plain = ["$monai.utils.set_determinism(0)", "$@train#trainer.run()"]
    swapping = {"lmswap#policy": "swap_all", "lmswap#min_swap_bytes": 4096}
    actual = run(**swapping)
    expected = run(**{"train#handlers": [], "run": run_plain, "lmswap": None})
    assert same_bits(actual, expected)
    assert "Swapping is on" in capsys.readouterr().out
    assert set(scalars(tmp_path)["lmswap/swapped_out_bytes"]) == {1, 2}
