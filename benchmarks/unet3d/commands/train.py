"""`train`: trains the network with the full recipe, in any size, from scans or synthetic subjects."""

from __future__ import annotations

import argparse
import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from benchmarks.console import make_console
from benchmarks.unet3d.commands.arguments import (
    add_enable,
    add_folder,
    add_network,
    enable_arguments,
    positive,
    seed,
    size,
)
from benchmarks.unet3d.dataset import DataSet, made_folder, make_data, prepare_data
from benchmarks.unet3d.recipe import MAX_EPOCHS
from benchmarks.unet3d.split import keep_split
from benchmarks.unet3d.train import BEST, LOG, Epoch, Settings, train
from benchmarks.unet3d.training_view import TrainingView
from lmswap.hardware.device import default_device

if TYPE_CHECKING:
    from lmswap.cli import Commands


def add_to(commands: Commands) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "train",
        help="train with the full recipe of the case study; resumes where it was stopped",
        description="Trains the 3D U-Net with Adam, 48 positions of each subject, a rate that halves on plateaus, and "
        "early stopping. The same command goes on after a stop or a kill, with the same bits.",
        epilog="example: python -m benchmarks.unet3d train --size 64 --subjects 12 --output trained",
    )
    parser.add_argument("--size", type=size, required=True, metavar="N", help="cube side, a multiple of 16")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR", help="a BraTS folder")
    source.add_argument("--subjects", type=positive, metavar="N", help="make so many subjects with synthetic tumours")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for checkpoint, weights and log")
    parser.add_argument("--split", type=Path, metavar="FILE", help="kept there (default: split.json in --output)")
    parser.add_argument("--skip-damaged", action="store_true", help="train without subjects that cannot be used")
    parser.add_argument("--epochs", type=positive, default=MAX_EPOCHS, metavar="N", help="at most (%(default)s)")
    add_network(parser)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, order and dropout (%(default)s)")
    add_enable(parser, without="plain torch")
    add_folder(parser, "synthetic subjects and cubes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Trains; 0 when the training is complete, 1 when no epoch was of use, 130 when it was interrupted by Ctrl-C."""
    swapping = enable_arguments(arguments)
    console = make_console()
    data = find_data(arguments, console)
    split = keep_split(arguments.split or arguments.output / "split.json", data.subjects, arguments.seed)
    settings = Settings(
        size=arguments.size,
        epochs=arguments.epochs,
        seed=arguments.seed,
        head=arguments.head,
        dtype=arguments.dtype,
        device=default_device().type,
        swapping=swapping,
        output=arguments.output,
    )
    _announce(console, settings, data)
    view = TrainingView(
        console, epochs=settings.epochs, steps=len(split.training), validation_steps=len(split.validation)
    )
    try:
        with view:
            history = train(settings, data, split, view.on_event)
    except KeyboardInterrupt:
        console.print(f"Stopped. The same command goes on from the checkpoint in {settings.output}", highlight=False)
        return 128 + signal.SIGINT
    return _conclude(console, settings, history)


def find_data(arguments: argparse.Namespace, console: Console) -> DataSet:
    """Make or find the subjects and their cubes; damaged ones end the command, or are named and left out on request."""
    names = None if arguments.subjects is None else make_data(arguments.folder, arguments.subjects)
    root = arguments.data if names is None else made_folder(arguments.folder)
    with console.status("reading scans") as status:
        data = prepare_data(
            root,
            arguments.size,
            arguments.folder / "cubes",
            lambda done, total: status.update(f"reading scans: {done} of {total} subjects"),
            names=names,
        )
    if not arguments.skip_damaged:
        data.require_whole("Repair them or take them out, or give --skip-damaged to train without these subjects")
    elif data.damaged:
        console.print(f"[yellow]left out:[/] {data.describe_faults()} subjects", highlight=False)
        for fault in data.faults:
            console.print(f"  {escape(fault)}", highlight=False)
    return data


def _announce(console: Console, settings: Settings, data: DataSet) -> None:
    under = "plain torch"
    if settings.swapping is not None:
        under = "lmswap, " + ", ".join(f"{name} {value}" for name, value in settings.swapping.items())
    console.print(
        f"3D U-Net at {settings.size}³, {settings.dtype}, {len(data.subjects)} subjects ({escape(data.kind)}), "
        f"on {settings.device} with {escape(under)}",
        highlight=False,
    )


def _conclude(console: Console, settings: Settings, history: list[Epoch]) -> int:
    best = min(
        (epoch for epoch in history if not math.isnan(epoch.val_loss)), key=lambda each: each.val_loss, default=None
    )
    if best is None:
        lost = f"The validation loss is no number in any of {len(history)} epochs, so no weights were kept"
        console.print(f"{lost}; the log is {settings.output / LOG}", highlight=False)
        return 1
    why = "all epochs are done" if len(history) >= settings.epochs else "the validation loss falls no more"
    console.print(
        f"Complete after {len(history)} epochs: {why}. Lowest validation loss {best.val_loss:.4f}, of epoch "
        f"{best.epoch}: its weights are {settings.output / BEST}; the log is {settings.output / LOG}",
        highlight=False,
    )
    return 0
