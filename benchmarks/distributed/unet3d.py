"""Trains the 3D U-Net, a subject on each rank: ``torchrun --nproc-per-node 2 -m benchmarks.distributed.unet3d``.

One way a start, plain or under a budget, so that each peak is that way's own.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import distributed

from benchmarks.distributed.entry import measure, recipe_parser
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.results import Results, Training, describe_origin, slowest_median
from benchmarks.unet3d.brats import DataError, find_subjects
from benchmarks.unet3d.commands.arguments import add_network, positive, size
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.dataset import made_folder, make_data
from benchmarks.unet3d.preprocess import prepare_cube
from benchmarks.unet3d.run import run
from lmswap.hardware.device import default_device
from lmswap.ir.bytesize import parse_bytes

# On a CPU a step at 64³ takes two seconds on one core; on a GPU as in Table 7.
SIZES = {"cpu": 64, "cuda": 192}
TIMED_STEPS = {"cpu": 3, "cuda": 30}
WARM_UP_STEPS = 5  # lmswap captures and measures in the first, and plans again until the fourth
FOLDER = Path("distributed-output")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains as one of the ranks that torchrun started; 0 if all of them finished."""
    arguments = make_parser().parse_args(argv)
    return measure(partial(_train, arguments=arguments), arguments.record)


def _train(ranks: Ranks, *, arguments: argparse.Namespace) -> Results:
    root = arguments.data or made_folder(FOLDER)
    if arguments.data is None:
        ranks.first(lambda: make_data(FOLDER, ranks.size))
    subjects = find_subjects(root)[: ranks.size]
    if len(subjects) < ranks.size:
        raise DataError(f"{root} has {len(subjects)} subjects, fewer than the {ranks.size} ranks")
    cubes: list[Path] = []
    prepare: Callable[[], object] = lambda: cubes.extend(  # noqa: E731
        prepare_cube(subject, arguments.size, FOLDER / "cubes") for subject in subjects
    )
    ranks.first(prepare)
    if not cubes:
        prepare()  # they are there now
    budget_bytes = None if arguments.budget is None else parse_bytes(arguments.budget)
    configuration = Configuration(
        size=arguments.size,
        steps=WARM_UP_STEPS + arguments.steps,
        policy=None if budget_bytes is None else "auto",
        budget_bytes=budget_bytes,
        cap_bytes=None,
        head=arguments.head,
        dtype=arguments.dtype,
        device=str(ranks.device),
        seed=0,
        cubes=tuple(map(str, cubes[ranks.rank :: ranks.size])),
        warm_up_steps=WARM_UP_STEPS,
        counts_tensors=False,
        ranks=ranks.size,
    )
    mine = run(configuration, lambda _: None, distributed.barrier, ranks.share)
    found = ranks.gather((mine.timed_seconds, mine.peak_bytes, (mine.loss_bits, mine.weights_sha256)))
    point = Training(
        name=f"{arguments.size}³, {arguments.dtype}",
        ranks=ranks.size,
        batch=1,
        budget_bytes=budget_bytes,
        step_seconds=slowest_median([seconds for seconds, _, _ in found]),
        peak_bytes=max(peak_bytes for _, peak_bytes, _ in found),
        swapped_bytes=mine.swapping.out_bytes if mine.swapping else None,
        bits=hashlib.sha256(repr([bits for _, _, bits in found]).encode()).hexdigest(),
        accuracy=None,
    )
    return Results("unet3d", describe_origin(ranks), trainings=(point,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what to train."""
    device = default_device().type
    parser.add_argument("--data", type=Path, metavar="DIR", help="a BraTS folder; default: synthetic subjects")
    parser.add_argument("--size", type=size, default=SIZES[device], metavar="N", help="of images (%(default)s)")
    parser.add_argument(
        "--steps", type=positive, default=TIMED_STEPS[device], metavar="N", help="that are timed (%(default)s)"
    )
    add_network(parser)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    return recipe_parser("unet3d", __doc__, add_arguments)


if __name__ == "__main__":
    sys.exit(main())
