"""The examples run, each at a tiny size, and are as short as they claim."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import lmswap
from lmswap import api

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = {
    "unet3d_volume": ["--side", "32", "--steps", "1", "--budget", "1GiB"],
    "gpt_text": ["--layers", "1", "--length", "16", "--batch", "2", "--steps", "1", "--budget", "1GiB"],
    "gpt_recipe": ["--layers", "1", "--batch", "2", "--steps", "1", "--budget", "1GiB"],
    "compile_backend": ["--layers", "1", "--batch", "16", "--budget", "1GiB"],
    "gpu_or_cpu": ["--batch", "2", "--side", "8", "--steps", "1", "--gpu-budget", "1GiB", "--cpu-budget", "1GiB"],
    "frozen_base": [
        *["--layers", "2", "--width", "64", "--batch", "4", "--steps", "2", "--budget", "1GiB", "--weights", "swap"],
    ],
    "profile_inside": ["--layers", "1", "--batch", "16", "--budget", "1GiB", "--output", "profiled"],
}
SAYS = {"compile_backend": "the same bits as plain torch", "profile_inside": "lmswap profile: 3 steps in a block"}


def test_each_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TINY}


@pytest.mark.parametrize("example", TINY)
def test_the_example_runs(example, tmp_path, monkeypatch, capsys):
    torch.compiler.reset()  # which takes the shapes that other tests gave to the same layers for varying ones
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / f"{example}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *TINY[example]])
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        for model in [*api._sessions]:
            lmswap.disable(model)
    assert SAYS.get(example, "lmswap report: ") in capsys.readouterr().out


@pytest.mark.parametrize("example", TINY)
def test_the_example_is_short(example):
    assert len((EXAMPLES / f"{example}.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_a_nifti_file_becomes_a_volume_of_the_requested_side(tmp_path, monkeypatch):
    import nibabel
    import numpy as np

    scan = np.arange(4 * 5 * 6, dtype=np.float32).reshape(4, 5, 6)
    nibabel.save(nibabel.Nifti1Image(scan, np.eye(4)), tmp_path / "scan.nii.gz")
    read_volume = runpy.run_path(str(EXAMPLES / "unet3d_volume.py"))["read_volume"]
    volume = read_volume(str(tmp_path / "scan.nii.gz"), 32)
    assert volume.shape == (1, 1, 32, 32, 32)
    assert abs(volume.mean().item()) < 1e-5 and abs(volume.std().item() - 1) < 1e-5
