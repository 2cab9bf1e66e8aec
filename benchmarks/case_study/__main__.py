"""Measures IBM's case study again on this machine and writes the page: ``python -m benchmarks.case_study``.

Each stage is saved when it is over; the same command goes on where an aborted one stopped. ``--from FILE`` only
rewrites the pages of stored results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.case_study.boxes import measure_boxes
from benchmarks.case_study.findings import headline
from benchmarks.case_study.ladder import climb
from benchmarks.case_study.links import compare_links
from benchmarks.case_study.page import write_pages
from benchmarks.case_study.predict import predict
from benchmarks.case_study.replicas import run_replicas
from benchmarks.case_study.results import Evaluation, Origin, Results, Settings
from benchmarks.case_study.runner import Runner, sharing_cores
from benchmarks.console import make_console
from benchmarks.unet3d import synthetic
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.commands.arguments import add_network, positive, seed, size
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.evaluate import SCORES
from benchmarks.unet3d.scores import read_scores
from benchmarks.unet3d.study import describe_machine
from lmswap.errors import OptionError
from lmswap.hardware.device import default_device, describe_device
from lmswap.ir.bytesize import parse_bytes

RESULTS = "results.json"
# Pairs of 2.37 times the voxels, as the case study's; with them on a GPU its other sizes, and larger ones.
SIZES = {"cpu": (96, 128), "cuda": (144, 192)}
STEPS = {"cpu": 3, "cuda": 10}  # timed, in each run; on a CPU of two cores one takes 8 s
LADDER = {"cpu": (), "cuda": (112, 128, 160, 176, 208, 224, 256)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if everything finished, 1 if a run failed, 2 for bad input, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return run_to_end("case study", lambda: _run(arguments, _command(argv), make_console()))


def _run(arguments: argparse.Namespace, command: str, console: Console) -> int:
    if arguments.rendered is not None:
        results, folder = Results.read(arguments.rendered), arguments.output or arguments.rendered.parent
        source = arguments.rendered
    else:
        folder = arguments.output or Path("case-study-output")
        source = folder / RESULTS
        settings = _settings(arguments)
        with sharing_cores(settings.device, settings.replicas):
            results = _measure(settings, folder, command, console)
    folder.mkdir(parents=True, exist_ok=True)
    written = write_pages(results, source.name, folder)
    console.print(f"\n[bold]{headline(results)}[/]", highlight=False)
    console.print(f"Written: {', '.join(map(str, [source, *written]))}", highlight=False)
    return int(bool(results.failures))


def _measure(settings: Settings, folder: Path, command: str, console: Console) -> Results:
    """Runs the stages whose results ``folder`` does not hold yet; returns the results of all stages."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULTS
    runner = Runner(settings, folder, console)
    results = _begun(path, settings) if path.exists() else Results(settings, _origin(runner, command))

    def stage(name: str, title: str, run: Callable[[], Any]) -> None:
        nonlocal results
        if getattr(results, name) is not None:
            console.print(f"[dim]{title}: done before[/]")
            return
        console.rule(title)
        found: dict[str, Any] = {name: run()}
        results = replace(results, **found)
        results.write(path)

    results.write(path)
    stage("boxes", "Table 1: boxes", lambda: measure_boxes(runner.subjects))
    if settings.evaluation is not None:
        stage("evaluation", "Scores", lambda: _evaluation(Path(settings.evaluation or "")))
    stage("predictions", "Predictions", predict)
    stage("ladder", "A larger image in the same memory", lambda: climb(runner))
    if (ladder := results.ladder) is not None:
        stage("links", "Links", lambda: compare_links(runner, ladder))
        if (links := results.links) is not None:
            stage("replicas", "Trainings at once", lambda: run_replicas(runner, ladder, links, folder))
    return results


def _evaluation(folder: Path) -> Evaluation:
    scores = read_scores(folder / SCORES)
    is_made = any(score.subject.startswith(synthetic.NAME_PREFIX) for score in scores)
    return Evaluation(str(folder), synthetic.DATA_KIND if is_made else "BraTS layout, as given", scores)


def _begun(path: Path, settings: Settings) -> Results:
    """The results of an aborted run of the same settings and code.

    Raises:
        DataError: what is there is of other settings or of other code.
    """
    results = Results.read(path)
    commit = describe_machine().commit
    if results.settings != settings or results.origin.machine.commit != commit:
        raise DataError(
            f"{path} holds another case study ({results.origin.command}, at {results.origin.machine.commit}); "
            "give another --output, or move that folder away"
        )
    return results


def _origin(runner: Runner, command: str) -> Origin:
    device = describe_device(default_device())
    return Origin(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        data=runner.data,
        device=device.name,
        driver=device.driver,
        machine=describe_machine(),
    )


def _settings(arguments: argparse.Namespace) -> Settings:
    device = default_device().type
    small, large = arguments.sizes or SIZES[device]
    if small >= large:
        raise OptionError(f"--sizes takes the size that just fits, then a larger one, not {small} {large}")
    return Settings(
        small=small,
        large=large,
        ladder=tuple(LADDER[device] if arguments.ladder is None else arguments.ladder),
        device=device,
        replicas=arguments.replicas,
        repeats=arguments.repeats,
        timed_steps=arguments.steps or STEPS[device],
        budget_bytes=None if arguments.budget is None else parse_bytes(arguments.budget),
        head=arguments.head,
        dtype=arguments.dtype,
        seed=arguments.seed,
        data=arguments.data,
        evaluation=arguments.evaluation,
    )


def _command(argv: Sequence[str] | None) -> str:
    return shlex.join(["python", "-m", "benchmarks.case_study", *(sys.argv[1:] if argv is None else argv)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.case_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sizes", type=size, nargs=2, metavar="N", help="what just fits, and what shall (96 128; on a GPU 144 192)"
    )
    parser.add_argument("--ladder", type=size, nargs="*", metavar="N", help="other sizes (none; on a GPU 112 to 256)")
    parser.add_argument("--budget", help='bytes or "6GiB"; default: the peak of the first size without lmswap')
    parser.add_argument("--replicas", type=positive, default=2, metavar="N", help="trainings at once (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=2, metavar="N", help="of what is compared (%(default)s)")
    parser.add_argument(
        "--steps", type=positive, metavar="N", help=f"timed steps a run ({STEPS['cpu']}; on a GPU {STEPS['cuda']})"
    )
    add_network(parser)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights and dropout (%(default)s)")
    parser.add_argument("--data", metavar="DIR", help="a BraTS folder; default: synthetic subjects")
    parser.add_argument("--evaluation", metavar="DIR", help="what python -m benchmarks.unet3d evaluate wrote")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for everything (case-study-output)")
    parser.add_argument(
        "--from", dest="rendered", type=Path, metavar="FILE", help="write the pages of these results, measure nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
