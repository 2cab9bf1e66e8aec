"""nnU-Net's trainer within a budget: its plain bits, with validation in each epoch."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

from tests.training import same_bits

pytest.importorskip("nnunetv2", reason="nnunetv2 is missing, which needs a torchvision of its own")

LEVELS, SIDE = 3, 16
ARCHITECTURE = {
    "n_stages": LEVELS,
    "features_per_stage": [8, 16, 32],
    "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[3, 3, 3]] * LEVELS,
    "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
    "n_conv_per_stage": [1] * LEVELS,
    "n_conv_per_stage_decoder": [1] * (LEVELS - 1),
    "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "dropout_op": None,
    "dropout_op_kwargs": None,
    "nonlin": "torch.nn.LeakyReLU",
    "nonlin_kwargs": {"inplace": True},
}
CONFIGURATION = {
    "data_identifier": "volumes",
    "batch_size": 2,
    "patch_size": [SIDE] * 3,
    "spacing": [1.0, 1.0, 1.0],
    "batch_dice": True,
    "architecture": {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": ARCHITECTURE,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    },
}
PLANS = {"dataset_name": "Dataset001", "plans_name": "nnUNetPlans", "configurations": {"3d_fullres": CONFIGURATION}}
DATASET = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "tumour": 1}, "file_ending": ".nii.gz"}


@pytest.fixture
def trainers(tmp_path, monkeypatch):
    """The trainer of nnU-Net and ours, over volumes that are drawn at random."""
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["nnUNetv2_train"])
    from nnunetv2.training.nnUNetTrainer import nnUNetTrainer

    monkeypatch.setattr(nnUNetTrainer, "infer_dataset_class", lambda folder: None)

    from lmswap.integrations.nnunet import LmswapTrainer

    class Synthetic(nnUNetTrainer.nnUNetTrainer):
        def on_train_start(self):
            self.initialize()
            self.num_epochs, self.num_iterations_per_epoch, self.num_val_iterations_per_epoch = 2, 2, 1
            self.disable_checkpointing = True
            batches = [self.batch(seed) for seed in range(2)]
            self.dataloader_train = self.dataloader_val = itertools.cycle(batches)

        def batch(self, seed):
            generator = torch.Generator().manual_seed(seed)
            data = torch.randn(2, 1, SIDE, SIDE, SIDE, generator=generator)
            scales = range(LEVELS - 1)
            return {"data": data, "target": [(data[..., :: 2**s, :: 2**s, :: 2**s] > 0.5).float() for s in scales]}

    class Ours(LmswapTrainer, Synthetic):
        budget = "1GiB"
        options = {"policy": "swap_all", "min_swap_bytes": 4096}  # noqa: RUF012

    class OursWithState(Ours):
        options = {**Ours.options, "optimizer": True}  # noqa: RUF012

    def train(kind):
        torch.manual_seed(0)
        plans = {**PLANS, "continue_training": False}
        trainer = kind(plans, "3d_fullres", 0, DATASET, torch.device("cpu"))
        trainer.run_training()
        return trainer

    return train, Synthetic, Ours, OursWithState


def test_the_network_has_plain_bits(trainers):
    train, plain, ours, _ = trainers
    expected, found = train(plain), train(ours)
    assert same_bits([*found.network.parameters()], [*expected.network.parameters()])
    assert found.managed.report().swapped_out_bytes > 0
    assert found.network._compiled_call_impl is None
    assert "Swapping is on" in Path(found.log_file).read_text()


def test_a_non_resident_training_state_has_plain_bits(trainers):
    train, plain, _, ours = trainers
    expected, found = train(plain), train(ours)
    assert same_bits([*found.network.parameters()], [*expected.network.parameters()])
    assert found.managed.report().state_in_bytes > 0
