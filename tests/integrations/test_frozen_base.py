"""A swapped base of transformers from its files: Trainer, adapters of peft, generation, files; all with plain bits."""

import pytest
import torch

import lmswap
from tests.training import same_bits

pytest.importorskip("transformers", reason="transformers is missing, which make integrations installs")
pytest.importorskip("peft", reason="peft is missing, which make integrations installs")
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from lmswap.integrations.transformers import LmswapCallback
from tests.integrations.trainers import trainer_of

SWAPPING = {"policy": "swap_all", "weights": "swap", "min_swap_bytes": 1024}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in several files, whose embedding is its head, too."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    return folder


@pytest.fixture
def base(folder, monkeypatch):
    """Load the base, frozen; to be enabled or not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return lambda: LlamaForCausalLM.from_pretrained(folder).requires_grad_(False)


def adapted(base):
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    model = get_peft_model(base, LoraConfig(r=4, **settings))
    model.add_adapter("second", LoraConfig(r=2, **settings))
    model.set_adapter("default")
    return model


def batch(seed):
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))


def train(model, steps):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def logits(model):
    with torch.no_grad():
        return model(input_ids=batch(9)).logits


def saved(model, folder):
    model.save_pretrained(folder)
    found = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return [tensors[name] for tensors in found.values() for name in sorted(tensors)]


def test_adapters_are_trained_switched_merged_and_saved(base, tmp_path):
    def run(name, **options):
        model = adapted(base())
        if options:
            lmswap.enable(model, "1GiB", **options)
        seen = [*train(model, 2), logits(model)]
        with model.disable_adapter():
            seen.append(logits(model))
        model.set_adapter("second")
        seen += train(model, 2)
        model.set_adapter("default")
        model.merge_adapter()
        seen.append(logits(model))
        model.unmerge_adapter()
        model.base_model.model.model.layers[1].mlp.requires_grad_(True)
        seen += train(model, 2)
        swapped_bytes = lmswap.report(model).swapped_in_bytes if options else 0
        seen += saved(model, tmp_path / name / "adapter")
        merged = model.merge_and_unload()
        seen += [logits(merged), *saved(merged, tmp_path / name / "merged")]
        lmswap.disable(model)
        return [*seen, logits(merged), *merged.parameters()], swapped_bytes

    expected, _ = run("plain")
    found, swapped_bytes = run("swapped", **SWAPPING)
    assert same_bits(found, expected)
    assert swapped_bytes > 0


def test_the_trainer_trains_and_evaluates_a_model_that_was_enabled_before(base, tmp_path):
    rows = [{"input_ids": row, "labels": row} for seed in range(4) for row in batch(seed)]

    def run(name, **options):
        model = adapted(base())
        if options:
            lmswap.enable(model, "1GiB", **options)
        settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_strategy": "steps"}
        trainer = trainer_of(tmp_path / name, model, batch=4, data=rows, **settings)
        callback = LmswapCallback(trainer)
        if options:
            trainer.add_callback(callback)
        trainer.train()
        figures = [entry.get("eval_loss", entry.get("loss")) for entry in trainer.state.log_history[:-1]]
        tensors = [*model.parameters(), *saved(model, tmp_path / name / "trained")]
        return [tensor.clone() for tensor in tensors], [each for each in figures if each is not None], callback, model

    expected, expected_figures, *_ = run("plain")
    found, figures, callback, model = run("swapped", **SWAPPING)
    assert same_bits(found, expected)
    assert figures == expected_figures
    assert callback.report.swapped_in_bytes > 0
    assert str(lmswap.report(model))  # it stays enabled
    lmswap.disable(model)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_generation_with_a_cache_has_plain_tokens(base, settings):
    def run(**options):
        model = base().eval()
        if options:
            lmswap.enable(model, "1GiB", **options)
        found = model.generate(batch(0)[:, :5], max_new_tokens=10, do_sample=False, eos_token_id=None, **settings)
        lmswap.disable(model)
        return [found]

    assert same_bits(run(**SWAPPING), run())
