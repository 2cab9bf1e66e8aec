"""Trains ResNet-50 on images: ``torchrun --nproc-per-node 2 -m benchmarks.distributed.resnet50``.

Each rank has its share of each step's images; the learning rate rises with the number of ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.distributed.entry import measure, recipe_parser, say_on
from benchmarks.distributed.images import make_digits
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.results import Results, describe_origin
from benchmarks.distributed.training import MakeNetwork, Settings, make_resnet50, train
from benchmarks.unet3d.commands.arguments import positive
from lmswap.hardware.device import default_device
from lmswap.ir.bytesize import parse_bytes

# On a CPU a step takes four seconds on one core, and activations more memory than weights, gradients and momentum; on a
# GPU all is as in the write-up.
SIZES = {"cpu": 64, "cuda": 224}
BATCHES = {"cpu": 64, "cuda": 256}
STEPS = {"cpu": 8, "cuda": None}  # if no epochs are given
EPOCHS = 90
DTYPES = {"cpu": "fp32", "cuda": "fp16"}
DIGITS = Path("distributed-output") / "digits"


def main(argv: Sequence[str] | None = None, make_network: MakeNetwork = make_resnet50) -> int:
    """Trains as one of the ranks that torchrun started; 0 if all of them finished."""
    arguments = recipe_parser("resnet50", __doc__, add_arguments).parse_args(argv)
    return measure(partial(_train, arguments=arguments, make_network=make_network), arguments.record)


def _train(ranks: Ranks, *, arguments: argparse.Namespace, make_network: MakeNetwork) -> Results:
    if arguments.data is None:
        ranks.first(lambda: make_digits(DIGITS))
    settings = Settings(
        data=arguments.data or DIGITS,
        size=arguments.size,
        batch=arguments.batch,
        epochs=arguments.epochs or EPOCHS,
        steps=arguments.steps or (None if arguments.epochs else STEPS[ranks.device.type]),
        optimizer=arguments.optimizer,
        reduction=arguments.reduction,
        dtype=arguments.dtype,
        budget_bytes=None if arguments.budget is None else parse_bytes(arguments.budget),
        checkpoint=arguments.checkpoint,
        checkpoint_steps=arguments.checkpoint_steps,
    )
    point = train(settings, ranks, say_on(ranks), make_network)
    return Results("resnet50", describe_origin(ranks), trainings=(point,))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what to train."""
    device = default_device().type
    parser.add_argument("--data", type=Path, metavar="DIR", help="train/CLASS/*.jpg, val/CLASS/*.jpg; default: digits")
    parser.add_argument("--size", type=positive, default=SIZES[device], metavar="N", help="of images (%(default)s)")
    parser.add_argument("--batch", type=positive, default=BATCHES[device], metavar="N", help="of a rank (%(default)s)")
    parser.add_argument("--epochs", type=positive, metavar="N", help=f"({EPOCHS})")
    parser.add_argument(
        "--steps", type=positive, metavar="N", help=f"at most ({STEPS[device] or 'all'}; with --epochs all of them)"
    )
    parser.add_argument("--optimizer", choices=("sgd", "lars"), default="sgd", help="(%(default)s)")
    parser.add_argument(
        "--reduction", choices=("flat", "hierarchical"), default="flat", help="of gradients over ranks (%(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16"), default=DTYPES[device],
        help="fp16, bf16: autocast, in fp16 with a loss scale of 1024 (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="that all ranks see, to go on from")
    parser.add_argument(
        "--checkpoint-steps", type=positive, default=500, metavar="N", help="between two of them (%(default)s)"
    )


if __name__ == "__main__":
    sys.exit(main())
