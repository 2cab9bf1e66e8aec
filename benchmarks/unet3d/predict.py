"""Predictions of a trained network for a subject: labels as a cube, and as a NIfTI volume aligned to the scans."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from benchmarks.unet3d.brats import LABELS, DataError, require
from benchmarks.unet3d.checkpoint import load_state, reading
from benchmarks.unet3d.files import writing
from benchmarks.unet3d.network import UNet3d
from benchmarks.unet3d.preprocess import Normalization, Place, resample_labels
from benchmarks.unet3d.recipe import Dtype, autocast
from benchmarks.unet3d.train import BEST, SCHEMA

Labels = npt.NDArray[np.uint8]
Affine = npt.NDArray[np.float64]

THRESHOLD = 0.5


@dataclass(frozen=True)
class Trained:
    """A trained network and a description of its training data."""

    name: str
    network: nn.Module
    size: int
    dtype: Dtype
    epoch: int
    data: str
    validation: tuple[str, ...]
    normalization: Normalization


def load_trained(folder: Path, device: str) -> Trained:
    """Loads the best weights that `benchmarks.unet3d.train` left in ``folder``; the network is ready to predict.

    Raises:
        DataError: there are none, or they cannot be read.
    """
    if not (folder / BEST).exists():
        raise DataError(f"{folder} has no {BEST}: give the --output of a `benchmarks.unet3d train` that ended an epoch")
    state = load_state(folder / BEST)
    if state.get("schema") != SCHEMA:
        raise DataError(f"{folder / BEST} has schema {state.get('schema')}, not {SCHEMA}")
    with reading(folder / BEST):
        network = UNet3d(head=state["head"])
        network.load_state_dict(state["model"])
        return Trained(
            name=folder.resolve().name,
            network=network.to(device).eval(),
            size=state["size"],
            dtype=state["dtype"],
            epoch=state["epoch"],
            data=state["data"],
            validation=tuple(state["validation subjects"]),
            normalization=Normalization(*(np.array(state[name], np.float32) for name in ("means", "stds"))),
        )


@torch.no_grad()
def predict(network: nn.Module, images: Tensor, dtype: Dtype) -> Labels:
    """Predicts the labels (n, n, n) of images (modality, n, n, n) on the network's device."""
    with autocast(images.device, dtype):
        probability = network(images[None])[0]
    return decide(probability)


def decide(probability: Tensor) -> Labels:
    """Labels (...) of probabilities (label, ...): the likeliest of LABELS where it reaches 0.5, else 0."""
    highest, channel = probability.float().max(dim=0)
    label = torch.tensor(LABELS, dtype=torch.uint8, device=probability.device)[channel]
    return torch.where(highest >= THRESHOLD, label, 0).cpu().numpy().astype(np.uint8)


def put_back(labels: Labels, place: Place) -> Labels:
    """The labels of a cube as a volume of the scans' shape, where the cube was cut from."""
    volume = np.zeros(place.shape, np.uint8)
    volume[place.box] = resample_labels(labels, volume[place.box].shape)
    return volume


def cube_affine(affine: Affine, place: Place, size: int) -> Affine:
    """Maps voxels of a cube to the patient, given what maps voxels of the scans.

    Borders of the cube are borders of its box: voxel i of n has its centre at start + (i + ½)·side/n − ½ of the scan.
    """
    start = np.array([side.start for side in place.box])
    scale = np.array([side.stop - side.start for side in place.box]) / size
    within = np.diag([*scale, 1.0])
    within[:3, 3] = start + scale / 2 - 0.5
    return affine @ within


def scan_affine(path: Path) -> Affine:
    """The affine from voxel indices of a scan to patient coordinates in mm, (4, 4)."""
    affine: Affine = require("nibabel", "reading NIfTI volumes").load(path).affine
    return affine


def write_labels(path: Path, labels: Labels, affine: Affine) -> None:
    """Writes labels as a NIfTI volume."""
    nibabel = require("nibabel", "writing NIfTI volumes")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(labels, affine), path)
