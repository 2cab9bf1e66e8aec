"""Makes subjects in the layout of BraTS 2021 from the MNI152 template: real anatomy, synthetic tumours, not BraTS.

Each subject is the template's brain stretched to a box drawn from Table 1 of the case study, with a tumour of noisy
ellipsoids (oedema around enhancing tumour around necrotic core) and four contrasts mixed from the tissue maps. Losses
and scores on such data say nothing about real tumours: whatever shows them says DATA_KIND.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.unet3d.brats import MODALITIES, TRUTH, DataError, require
from benchmarks.unet3d.files import writing

DATA_KIND = "synthetic tumours, not BraTS"
NAME_PREFIX = "Synthetic_"  # of every made subject
MARKER = "made-by-lmswap.json"  # in the folder of synthetic subjects: what they are, and from which seed
RECIPE = 1  # raised when the same seed would give other subjects

VOLUME_SHAPE = (240, 240, 155)
LPS_AFFINE = np.array([[-1, 0, 0, 0], [0, -1, 0, 239], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=np.float64)

# Table 1 of the case study: boxes of the BraTS 2017 brains in voxels.
BOX_MEAN, BOX_MIN, BOX_MAX = np.array([140, 171, 140]), np.array([124, 151, 121]), np.array([159, 191, 150])
BOX_SPREAD = 0.04  # standard deviation over mean; 285 draws then reach the table's extremes

# Brightness of each tissue and tumour part in each modality, relative to white matter in t1; chosen by eye after
# published examples of each contrast.
BRIGHTNESS = {
    #        csf   grey  white oedema necrosis enhancing
    "t1":    (0.25, 0.65, 1.00, 0.60, 0.35, 0.65),
    "t1ce":  (0.25, 0.70, 1.00, 0.60, 0.35, 1.60),
    "flair": (0.20, 0.75, 0.60, 1.35, 0.60, 1.10),
    "t2":    (1.60, 0.85, 0.60, 1.30, 1.40, 1.05),
}  # fmt: skip
WHITE_LEVEL = 1000  # int16 counts
NOISE = 0.03

# The tumour: radii of the oedema in mm (voxels), and of what lies inside it as shares of them.
OEDEMA_RADIUS = (18.0, 32.0)
ENHANCING_SHARE, NECROSIS_SHARE = 0.62, 0.38

NOTICE = """\
The volumes in this folder are made from the MNI152 template (ICBM 2009a nonlinear symmetric) that nilearn carries:
real average anatomy with synthetic tumours. They are not BraTS data. The template's notice:

Copyright (C) 1993-2009 Louis Collins, McConnell Brain Imaging Centre, Montreal Neurological Institute, McGill
University. Permission to use, copy, modify, and distribute this software and its documentation for any purpose and
without fee is hereby granted, provided that the above copyright notice appear in all copies. The authors and McGill
University make no representations about the suitability of this software for any purpose. It is provided "as is"
without express or implied warranty. The authors are not responsible for any data loss, equipment damage, property
loss, or injury to subjects or patients resulting from the use or misuse of this software package.
"""

Volume = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Template:
    """The brain of the template, cropped to its box, in BraTS' orientation: tissue shares and T1 texture."""

    mask: Volume
    tissues: Volume  # (3, X, Y, Z): csf, grey, white; they sum to 1 inside the mask
    texture: Volume  # the template over what its tissues predict, around 1


@dataclass(frozen=True)
class MadeSubject:
    """One subject before it is written: ``images`` int16 (modality, X, Y, Z), ``labels`` uint8 (X, Y, Z)."""

    images: npt.NDArray[np.int16]
    labels: npt.NDArray[np.uint8]


def make_subjects(root: Path, count: int, *, seed: int = 0) -> None:
    """Makes sure that ``root`` holds the first ``count`` subjects of ``seed``; makes only those that are not there.

    Raises:
        DataError: ``root`` holds something else, or nilearn, nibabel or scipy is missing.
    """
    _claim(root, seed)
    for index in range(count):
        name = subject_name(index)
        if not (root / name).exists():
            subject = make_subject(index, seed=seed)
            with writing(root / name):
                _write_subject(root, name, subject)


def subject_name(index: int) -> str:
    """What `make_subjects` calls a subject."""
    return f"{NAME_PREFIX}{index:05d}"


def is_made(root: Path) -> bool:
    """Whether the subjects in ``root`` were made by `make_subjects`."""
    return (root / MARKER).exists()


def _claim(root: Path, seed: int) -> None:
    origin = {"kind": DATA_KIND, "seed": seed, "recipe": RECIPE}
    marker = root / MARKER
    if marker.exists():
        if json.loads(marker.read_text()) != origin:
            raise DataError(
                f"{root} holds subjects made otherwise ({marker.read_text()}); remove or name another folder"
            )
        return
    if root.exists() and any(root.iterdir()):
        raise DataError(f"{root} is not empty and was not made here; name another folder for the synthetic subjects")
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        (root / "NOTICE.txt").write_text(NOTICE)
        marker.write_text(json.dumps(origin))


def make_subject(index: int, *, seed: int = 0) -> MadeSubject:
    """Makes one subject; the same index and seed give the same voxels."""
    random = np.random.default_rng([RECIPE, seed, index])
    template = _template()
    box = np.clip(np.rint(random.normal(BOX_MEAN, BOX_SPREAD * BOX_MEAN)), BOX_MIN, BOX_MAX).astype(int)
    mask = _stretch(template.mask, box, order=0) > 0
    tissues = np.stack([_stretch(tissue, box, order=1) for tissue in template.tissues])
    texture = _stretch(template.texture, box, order=1)
    labels = _make_tumour(tissues, mask, random)

    shares = np.stack([*tissues * (labels == 0), labels == 2, labels == 1, labels == 4]).astype(np.float32)
    images = np.zeros((len(MODALITIES), *VOLUME_SHAPE), np.int16)
    place = tuple(
        slice((full - side) // 2, (full - side) // 2 + side) for full, side in zip(VOLUME_SHAPE, box, strict=True)
    )
    for image, modality in zip(images, MODALITIES, strict=True):
        gain = random.uniform(0.85, 1.15)  # scanners disagree on units
        clean = np.tensordot(np.array(BRIGHTNESS[modality], np.float32), shares, axes=1) * texture
        noisy = clean + NOISE * random.standard_normal(clean.shape, dtype=np.float32)
        image[place] = np.where(mask, np.clip(gain * WHITE_LEVEL * noisy, 1, np.iinfo(np.int16).max), 0)
    whole = np.zeros(VOLUME_SHAPE, np.uint8)
    whole[place] = labels
    return MadeSubject(images, whole)


def _make_tumour(tissues: Volume, mask: npt.NDArray[np.bool_], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Draws nested, rough ellipsoids around a point of white matter; returns labels (X, Y, Z)."""
    seeds = np.flatnonzero((tissues[2] > 0.7) & mask)
    centre = np.unravel_index(seeds[random.integers(len(seeds))], mask.shape)
    radii = random.uniform(*OEDEMA_RADIUS, size=3)
    axes = np.ogrid[tuple(slice(0, side) for side in mask.shape)]
    distance = np.sqrt(sum(((axis - c) / r) ** 2 for axis, c, r in zip(axes, centre, radii, strict=True)))
    coarse = random.standard_normal(tuple(side // 10 + 2 for side in mask.shape)).astype(np.float32)
    distance = distance * (1 + 0.2 * _stretch(coarse, np.array(mask.shape), order=1))
    labels = np.zeros(mask.shape, np.uint8)
    labels[distance < 1] = 2
    labels[distance < ENHANCING_SHARE] = 4
    labels[distance < NECROSIS_SHARE] = 1
    return np.where(mask, labels, 0).astype(np.uint8)


@cache
def _template() -> Template:
    datasets = require("nilearn.datasets", "making subjects from the MNI152 template")
    volumes = [
        np.asarray(load(resolution=1).dataobj, np.float32)[::-1, ::-1]  # RAS to LPS
        for load in (
            datasets.load_mni152_brain_mask,
            datasets.load_mni152_template,
            datasets.load_mni152_gm_template,
            datasets.load_mni152_wm_template,
        )
    ]
    inside = volumes[0] > 0
    box = tuple(slice(where.min(), where.max() + 1) for where in np.nonzero(inside))
    mask, t1, grey, white = (volume[box] for volume in volumes)
    scale = np.maximum(grey + white, 1)
    grey, white = grey / scale * mask, white / scale * mask
    tissues = np.stack([mask - grey - white, grey, white])
    predicted = np.tensordot(np.array([t1[tissue > 0.9].mean() for tissue in tissues], np.float32), tissues, axes=1)
    texture = np.where(mask > 0, t1 / np.maximum(predicted, 0.1), 1)
    return Template(mask, tissues, np.clip(texture, 0.5, 1.5).astype(np.float32))


def _stretch(volume: Volume, shape: npt.NDArray[np.int_], *, order: int) -> Volume:
    ndimage = require("scipy.ndimage", "stretching the template")
    stretched: Volume = ndimage.zoom(volume, shape / volume.shape, order=order, mode="nearest", grid_mode=True)
    return stretched


def _write_subject(root: Path, name: str, subject: MadeSubject) -> None:
    """Writes the five files into a folder that gets its name when all are complete."""
    nibabel = require("nibabel", "writing NIfTI volumes")
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=root))
    try:
        for kind, volume in zip((*MODALITIES, TRUTH), (*subject.images, subject.labels), strict=True):
            nibabel.save(nibabel.Nifti1Image(volume, LPS_AFFINE), unfinished / f"{name}_{kind}.nii.gz")
        unfinished.chmod(0o755)
        unfinished.rename(root / name)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
