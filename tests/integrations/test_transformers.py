"""Hugging Face's Trainer with the callback: its plain bits, less memory, figures where it reports to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmswap.errors import OptionError
from tests.integrations.scripts import (
    BATCH,
    BUDGET_BYTES,
    FEW,
    PLAIN_BYTES,
    STATE_BUDGET_BYTES,
    STEPS,
    SWAPPED_PARAMETERS,
    WIDE,
    grown,
    loader,
    scalars,
    streams_within_the_budget,
)
from tests.training import same_bits, session_of

pytest.importorskip("transformers", reason="transformers is missing, which make integrations installs")
pytest.importorskip("accelerate", reason="accelerate is missing, which make integrations installs")
from accelerate.optimizer import AcceleratedOptimizer
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from lmswap.integrations.transformers import LmswapCallback
from tests.integrations.trainers import Regression, rows, trained, trainer_of


def test_trainer_bits_are_plain_and_the_peak_is_within_the_budget(tmp_path):
    torch.manual_seed(0)
    data = rows(BATCH)
    plain_trainer, our_trainer = (trainer_of(tmp_path, batch=BATCH, data=data) for _ in range(2))
    with grown() as plain:
        expected, _ = trained(plain_trainer)
    with grown() as ours:
        actual, callback = trained(our_trainer, BUDGET_BYTES, policy="swap_all")

    assert same_bits(actual, expected)
    assert callback.report.highest_peak_bytes <= BUDGET_BYTES < PLAIN_BYTES < plain.nbytes
    assert ours.nbytes < plain.nbytes
    assert callback.report.swapped_out_bytes > PLAIN_BYTES / 2


def test_a_training_state_beyond_the_budget_has_plain_bits(tmp_path, no_garbage):
    def trainer():
        torch.manual_seed(0)
        settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
        return trainer_of(tmp_path, Regression(**WIDE), **settings)

    expected, _ = trained(trainer())
    actual, callback = trained(trainer(), STATE_BUDGET_BYTES, optimizer=True)
    assert same_bits(actual, expected)
    assert streams_within_the_budget(callback.report)


def pad(rows):
    """Token ids, their mask and labels, of the length of the longest row."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(0), "attention_mask": (ids >= 0).long(), "labels": ids}


def test_lengths_that_vary_share_traces_with_plain_bits(tmp_path):
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=64, use_cache=False)
    data = [{"input_ids": torch.arange(length) % 64} for length in torch.randint(8, 64, (24,)).tolist()]

    def trainer():
        torch.manual_seed(0)
        made = trainer_of(tmp_path, GPT2LMHeadModel(config), batch=4, data=data, max_steps=6)
        made.data_collator = pad
        return made

    expected, _ = trained(trainer())
    actual, callback = trained(trainer(), "8GiB")
    assert same_bits(actual, expected)
    # Those of two lengths, and one for all; the graph breaks before the loss.
    assert callback.report.num_traces == 2 * 3


def test_figures_are_in_tensorboard_and_in_the_history_with_each_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trainer_of(tmp_path, report_to=["tensorboard"], eval_strategy="steps", max_steps=4, logging_steps=2)
    _, callback = trained(trainer, "6GiB")

    found = scalars(tmp_path / "events")
    assert set(found["train/loss"]) == set(found["train/lmswap/peak_bytes"]) == {2, 4}
    assert set(found["train/lmswap/budget_bytes"].values()) == {6 * 2**30}
    history = [entry for entry in trainer.state.log_history if "lmswap/peak_bytes" in entry]
    assert [entry["step"] for entry in history] == [2, 4]
    assert set(callback.report.metrics()) <= set(history[-1])


def test_accumulation_and_evaluation_within_training_have_plain_bits(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    expected, _ = trained(trainer_of(tmp_path, **settings))
    actual, callback = trained(trainer_of(tmp_path, **settings), "6GiB")
    assert same_bits(actual, expected)
    assert callback.report.trains


@pytest.mark.parametrize("options", [{}, SWAPPED_PARAMETERS], ids=["", "parameters"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(tmp_path, options):
    settings = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    expected, _ = trained(trainer_of(tmp_path / "whole", max_steps=4, **settings))
    trained(trainer_of(tmp_path / "parts", max_steps=2, **settings), "6GiB", **options)
    resumed = trainer_of(tmp_path / "parts", max_steps=4, **settings)
    actual, callback = trained(resumed, "6GiB", resumes=True, **options)
    assert same_bits(actual, expected)
    assert (callback.report.state_in_bytes > 0) == bool(options)


def test_a_language_model_has_plain_bits(tmp_path):
    tokens = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 100, (12, 32))]
    config = GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=2, n_positions=32, use_cache=False)

    def trainer():
        torch.manual_seed(0)
        return trainer_of(tmp_path, GPT2LMHeadModel(config), batch=4, data=tokens)

    expected, _ = trained(trainer())
    actual, callback = trained(trainer(), "6GiB", min_swap_bytes=4096, policy="swap_all")
    assert same_bits(actual, expected)
    assert callback.report.swapped_out_bytes > 0


def test_the_model_is_given_back_at_the_end_and_the_report_stays(tmp_path, enabled):
    trainer = trainer_of(tmp_path)
    _, callback = trained(trainer, "6GiB")
    assert not enabled()
    assert trainer.model._compiled_call_impl is None
    assert callback.report.steps == STEPS


def test_a_training_can_start_after_a_failed_one(tmp_path, enabled):
    class Failing(TrainerCallback):
        fails = True

        def on_step_end(self, *_, **__):
            if self.fails:
                raise RuntimeError("in the first step")

    trainer, failing = trainer_of(tmp_path), Failing()
    callback = LmswapCallback(trainer, "6GiB")
    trainer.add_callback(callback)
    trainer.add_callback(failing)
    with pytest.raises(RuntimeError, match="in the first step"):
        trainer.train()
    failing.fails = False
    trainer.train()
    assert callback.report.steps == STEPS
    assert not enabled()


def test_trainer_arguments_that_compile_or_copy_the_model_are_refused(tmp_path):
    callback, given = LmswapCallback(trainer_of(tmp_path), "6GiB"), {"model": Regression(), "optimizer": None}
    with pytest.raises(OptionError, match="torch_compile=True compiles the model"):
        callback.on_train_begin(SimpleNamespace(torch_compile=True, n_gpu=1), None, None, **given)
    with pytest.raises(OptionError, match="copies the model to 2 GPUs in each step, lmswap manages one"):
        callback.on_train_begin(SimpleNamespace(torch_compile=False, n_gpu=2), None, None, **given)


def test_state_streams_where_gradients_are_scaled(tmp_path):
    """Though the prepared optimizer keeps a step of before the callback."""
    trainer = trainer_of(tmp_path)
    optimizer = torch.optim.AdamW(trainer.model.parameters())
    prepared = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    callback = LmswapCallback(trainer, "1GiB", optimizer=True, min_swap_bytes=1024)
    callback.on_train_begin(trainer.args, None, None, model=trainer.model, optimizer=prepared)
    updates = session_of(trainer.model).updates
    updates.stream_state(updates.state_bytes)
    x, labels = loader(FEW).dataset[:FEW]
    prepared.scaler.scale(trainer.model(x, labels)["loss"]).backward()
    prepared.step()
    assert all(updates.is_non_resident(values["exp_avg"]) for p, values in optimizer.state.items() if p.nbytes > 1024)
    callback.on_train_end()


@pytest.mark.slow
def test_torchrun_ranks_that_evaluate_and_resume_have_plain_bits(tmp_path):
    def run(name, *budget):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "tests.integrations.trainer_ranks", str(folder), *budget]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        reported = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
        return torch.load(folder / "weights.pt"), reported

    expected, plainly = run("plain")
    actual, managed = run("managed", "6GiB")
    assert same_bits(actual, expected)
    for rank, plain in zip(managed, plainly, strict=True):
        assert rank["world"] == plain["world"] == 2
        assert len(rank["evaluations"]) == 2
        assert rank["evaluations"] == plain["evaluations"]
        assert rank["swapped_out_bytes"] > 0
        assert any("2 ranks of this machine" in note for note in rank["notes"])
