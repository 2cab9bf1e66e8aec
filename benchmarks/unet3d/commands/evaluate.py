"""`evaluate`: scores trained networks of one size or several, and shows their predictions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.console import make_console
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.commands.arguments import add_enable, add_folder, enable_arguments
from benchmarks.unet3d.dataset import made_folder, prepare_data
from benchmarks.unet3d.evaluate import SCORES, Evaluation, evaluate, load_all
from benchmarks.unet3d.plot_scores import plot_scores
from benchmarks.unet3d.plot_slices import plot_slices
from benchmarks.unet3d.scores import REGIONS, subject_means
from lmswap.hardware.device import default_device

if TYPE_CHECKING:
    from lmswap.cli import Commands

BOXES, SLICES = "scores.png", "slices.png"


def add_to(commands: Commands) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "evaluate",
        help="score trained networks by Dice, of several sizes at the largest",
        description="Predicts the validation subjects, writes predictions as NIfTI and scores as CSV, and draws box "
        "plots and slices. Predictions of smaller networks are resized to the largest size and scored against its "
        "truth.",
        epilog="example: python -m benchmarks.unet3d evaluate trained --output scores",
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="what train was given as --output")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a BraTS folder; default: synthetic ones in --folder")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="for scores, predictions, pictures")
    add_enable(parser, without="plain torch")
    add_folder(parser, "synthetic subjects and cubes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluates; 0 when all is written."""
    swapping = enable_arguments(arguments)
    console = make_console()
    models = load_all(arguments.models, default_device().type)
    root = arguments.data or made_folder(arguments.folder)
    with console.status("reading scans") as status:
        data = {
            size: prepare_data(
                root,
                size,
                arguments.folder / "cubes",
                lambda done, total: status.update(f"reading scans: {done} of {total} subjects"),
                names=models[0].validation,
            )
            for size in {model.size for model in models}
        }
        for prepared in data.values():
            prepared.require_whole("Repair them: the models were trained with these subjects")
            if prepared.kind != models[0].data:
                raise DataError(f"{root} holds {prepared.kind}; the models were trained on: {models[0].data}")
        evaluation = evaluate(
            models,
            data,
            arguments.output,
            swapping,
            lambda model, done, total: status.update(f"{escape(model)}: predicted {done} of {total} subjects"),
        )
        status.update("drawing")
        plot_scores(evaluation, arguments.output / BOXES)
        plot_slices(evaluation, arguments.output / SLICES)
    _print(console, evaluation)
    return 0


def _print(console: Console, evaluation: Evaluation) -> None:
    table = Table(
        title=f"Mean Dice, scored at {evaluation.scored_size}³: {evaluation.kind}",
        title_justify="left",
        title_style="",
        box=None,
    )
    for heading in ("size", "models", "subjects", *(region.replace("_", " ") for region in REGIONS)):
        table.add_column(heading, justify="right")
    for size in evaluation.sizes:
        means = [list(subject_means(evaluation.scores, size, region).values()) for region in REGIONS]
        subjects = {score.subject for score in evaluation.scores if score.size == size}
        table.add_row(
            f"{size}³",
            str(len(evaluation.models(size))),
            str(len(subjects)),
            *(f"{sum(values) / len(values):.3f}" if values else "–" for values in means),
        )
    console.print(table)
    written = ", ".join(str(evaluation.output / name) for name in (SCORES, BOXES, SLICES, "predictions"))
    console.print(f"Written: {written}", highlight=False)
