"""The terminal display of a comparison: progress of the runs, and the table at the end."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.unet3d.bars import Bars
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.measured import Run
from benchmarks.unet3d.run import Event
from benchmarks.unet3d.study import Study
from benchmarks.unet3d.verdict import Verdict
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import format_seconds

_MARKS = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[dim]·[/]"}


class ProgressView(Bars):
    """One bar per run with its loss and memory; hand ``on_event`` to `benchmarks.unet3d.study.compare`."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            console,
            14,
            TextColumn("loss {task.fields[loss]:>7}"),
            TextColumn("memory {task.fields[memory]:>10}"),
            TextColumn("[dim]{task.fields[phase]}"),
            TimeElapsedColumn(),
        )
        self._tasks: dict[Configuration, TaskID] = {}

    def on_event(self, configuration: Configuration, event: Event) -> None:
        """Show an event of a run's process."""
        if configuration not in self._tasks:
            self._tasks[configuration] = self._progress.add_task(
                configuration.name, total=configuration.steps, loss="–", memory="–", phase="starting"
            )
        task, name = self._tasks[configuration], configuration.name
        match event["event"]:
            case "phase":
                self._progress.update(task, phase=event["phase"])
                self.say(f"{name}: {event['phase']}")
            case "memory":
                self._progress.update(task, memory=format_bytes(event["bytes"]))
            case "step":
                self._progress.update(task, completed=event["step"], loss=f"{event['loss']:.4f}", phase="training")
                of, seconds = configuration.steps, format_seconds(event["seconds"])
                self.say(f"{name}: step {event['step']} of {of}, loss {event['loss']:.4f}, {seconds}")
            case "result":
                self._progress.update(task, memory=format_bytes(event["run"]["peak_bytes"]), phase="peak")
                self._progress.stop_task(task)
                self.say(f"{name}: peak {format_bytes(event['run']['peak_bytes'])}")
            case "failed":
                self._progress.update(task, phase="[red]failed")
                self._progress.stop_task(task)
                self.say(f"{name}: failed: {event['message']}")


def print_study(console: Console, study: Study, verdicts: list[Verdict]) -> None:
    """Prints the table of runs, what it shows, and where the figures come from."""
    console.print(_table(study))
    for verdict in verdicts:
        console.print(f" {_MARKS[verdict.holds]} {escape(verdict.text)}")
    machine = study.machine
    device = next((run.device for run in study.runs), "CPU")
    threads = next((run.threads for run in study.runs), machine.cores)
    computing = f"{threads} thread{'s' * (threads > 1)}"
    console.print(
        f"\n[dim]{escape(device)}; {escape(machine.cpu)}, {computing}, {format_bytes(machine.memory_bytes)} of memory; "
        f"torch {machine.torch}. Loss: weighted Dice on {len(study.subjects)} subjects, {study.data}. Step: "
        "median of all but the first. Tensors, stall, out, in and again (what is recomputed): of one step.[/]"
    )


def _table(study: Study) -> Table:
    table = Table(
        title=f"3D U-Net, batch 1, whole images{f', on {study.gpu}' if study.gpu else ''}: {study.data}. Peaks are of "
        + ("reserved device memory" if study.gpu else "resident memory beyond what was there before the first step"),
        title_justify="left",
        title_style="",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("\nrun", no_wrap=True)
    for heading in (
        "budget\nGiB", "peak\nGiB", "tensors\nGiB", "step\ns", "stall\ns", "out\nGiB", "in\nGiB", "again\nGiB",
        "last\nloss",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for run in study.runs:
        table.add_row(*_row(run))
    return table


def _row(run: Run) -> tuple[str, ...]:
    swapping = run.swapping if run.configuration.budget_bytes is not None else None
    return (
        run.configuration.name,
        *map(_gib, (run.configuration.budget_bytes, run.peak_bytes, run.tensor_peak_bytes)),
        f"{run.seconds_per_step:.2f}",
        "–" if swapping is None or swapping.stall_seconds is None else f"{swapping.stall_seconds:.2f}",
        _gib(swapping.out_bytes if swapping else None),
        _gib(swapping.in_bytes if swapping else None),
        _gib(swapping.recomputed_bytes if swapping else None),
        f"{run.losses[-1]:.4f}",
    )


def _gib(nbytes: int | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 2**30:.2f}"
