"""The split into training and validation subjects: drawn once and kept in a file, which trainings may share."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.checkpoint import replace_file

SCHEMA = "lmswap.unet3d.split/1"
TRAINING_SHARE = 0.8  # 228 and 57 of the 285 subjects of BraTS 2017


@dataclass(frozen=True)
class Split:
    """Names of subjects, each in one of the two."""

    training: tuple[str, ...]
    validation: tuple[str, ...]


def draw_split(names: Collection[str], seed: int) -> Split:
    """Shuffles and cuts; the order of ``names`` does not matter.

    Raises:
        DataError: too few subjects for both parts.
    """
    shuffled = sorted(names)
    random.Random(seed).shuffle(shuffled)
    count = int(TRAINING_SHARE * len(shuffled))
    if not 0 < count < len(shuffled):
        raise DataError(f"{len(shuffled)} subjects cannot train and validate; at least 2 are needed")
    return Split(tuple(shuffled[:count]), tuple(shuffled[count:]))


def keep_split(path: Path, names: Collection[str], seed: int) -> Split:
    """Reads the split of ``names`` from ``path``; draws and writes it if there is no such file.

    Raises:
        DataError: the file cannot be read or written, or splits other subjects; says which were added and which miss.
    """
    if not path.exists():
        split = draw_split(names, seed)
        text = json.dumps({"schema": SCHEMA, **asdict(split)}, indent=1) + "\n"
        replace_file(path, lambda file: file.write(text.encode()))
        return split
    split = _read(path)
    known, given = {*split.training, *split.validation}, set(names)
    if known != given:
        changes = [
            f"{len(some)} {what} ({', '.join(sorted(some)[:5])}{', …' if len(some) > 5 else ''})"
            for some, what in ((given - known, "not in the split"), (known - given, "not in the data any more"))
            if some
        ]
        raise DataError(
            f"{path} splits other subjects than the data has: {'; '.join(changes)}. "
            "Bring the subjects back, or name another split file: a model must not be scored on what it trained on"
        )
    return split


def _read(path: Path) -> Split:
    try:
        fields = json.loads(path.read_text())
        training, validation = tuple(fields["training"]), tuple(fields["validation"])
        is_whole = fields["schema"] == SCHEMA and len({*training, *validation}) == len(training) + len(validation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read as a split of subjects ({error})") from error
    if not is_whole or not training or not validation:
        raise DataError(f"{path} is no split of schema {SCHEMA}: a part is empty, or a subject is in it twice")
    return Split(training, validation)
