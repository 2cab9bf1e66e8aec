"""The models whose whole steps are planned."""

from __future__ import annotations

import pytest
import torch

from benchmarks.whole_step.models import MODELS, Checkpointed, example, variants


@pytest.mark.parametrize(("name", "layers"), [("vit-g", 40), ("unet3d", 12)])
def test_the_checkpointed_variant_has_the_same_parameters(name: str, layers: int) -> None:
    with torch.device("meta"):
        plain, checkpointed = (make() for make in variants(name, 28))
    shapes = [[parameter.shape for parameter in model.parameters()] for model in (plain, checkpointed)]
    assert shapes[0] == shapes[1]
    assert sum(isinstance(module, Checkpointed) for module in checkpointed.modules()) == layers
    assert not any(isinstance(module, Checkpointed) for module in plain.modules())


@pytest.mark.parametrize("name", MODELS)
def test_examples_have_the_count_and_no_bytes(name: str) -> None:
    inputs = example(name, 2, 32)
    assert (len(inputs), inputs.shape[-1], inputs.is_meta) == (2, 32, True)
