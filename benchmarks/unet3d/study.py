"""Runs several configurations, each in a fresh process, and compares them."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from benchmarks.compact import to_json
from benchmarks.unet3d import brats, synthetic
from benchmarks.unet3d.configuration import Configuration, Kind
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.fresh import OnEvent, run_compared
from benchmarks.unet3d.measured import Failure, Run
from benchmarks.unet3d.network import Head
from benchmarks.unet3d.preprocess import prepare_cube
from lmswap.hardware.device import default_device

SCHEMA = "lmswap.unet3d/1"
MAX_SUBJECTS = 3  # a comparison of a few steps takes the first ones only, and normalises over these


@dataclass(frozen=True)
class Settings:
    """What is to be compared. ``budget_bytes`` None: the peak of the first size without lmswap."""

    sizes: tuple[int, ...]
    steps: int
    budget_bytes: int | None
    policies: tuple[str, ...]  # of the runs within the budget
    head: Head
    dtype: Literal["fp32", "bf16"]
    seed: int
    data: Path | None  # a BraTS folder; None: synthetic subjects
    folder: Path  # for synthetic subjects, cubes and logs
    threads: int | None = None  # torch's, on a CPU; None: its own choice


@dataclass(frozen=True)
class Machine:
    """Where the figures come from, and from which code."""

    cpu: str
    cores: int
    memory_bytes: int
    torch: str
    python: str
    commit: str


@dataclass(frozen=True)
class Study:
    """The outcome of a comparison."""

    command: str
    created: str
    data: str
    subjects: tuple[str, ...]
    machine: Machine
    budget_bytes: int | None
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]

    @property
    def gpu(self) -> str | None:
        """The name of the GPU that it ran on; None: the CPU."""
        return next((run.device for run in self.runs if run.configuration.device == "cuda"), None)

    def find(self, size: int, kind: Kind) -> Run | None:
        """The run of a size and kind, None if there is none."""
        matches = (run for run in self.runs if (run.configuration.size, run.configuration.kind) == (size, kind))
        return next(matches, None)

    def write(self, path: Path) -> None:
        """Writes everything as JSON, schema "lmswap.unet3d/1", in bytes and seconds.

        Raises:
            DataError: ``path`` cannot be written.
        """
        write_text(path, to_json({"schema": SCHEMA, **asdict(self)}))


def compare(settings: Settings, on_event: OnEvent, *, command: str) -> Study:
    """Trains each size plainly, under the budget by each policy, and in the same graphs unswapped.

    Where the first size sets the budget it is trained plainly only; should that fail, nothing else is tried. Any other
    run that fails is kept as a failure, and the rest goes on. The runs of a size take their steps in turn where
    `run_compared` can; a plain one is part of that once another has shown what it will take.

    Args:
        settings: sizes, steps, budget, device, and the folder of data, cubes and logs.
        on_event: called with the configuration of a run and each event of its process.
        command: the command line, stored with the results.

    Returns:
        The runs and failures, with the machine that they were measured on.

    Raises:
        DataError: the scans cannot be used.
    """
    subjects, data = _subjects(settings)
    runs: list[Run] = []
    failures: list[Failure] = []

    def configuration(size: int, policy: str | None, budget_bytes: int | None = None) -> Configuration:
        return Configuration(
            size=size,
            steps=settings.steps,
            policy=policy,
            budget_bytes=budget_bytes,
            # Stands for a smaller card: one that just holds what torch's allocator took for the first size.
            cap_bytes=budget_bytes if device == "cuda" else None,
            head=settings.head,
            dtype=settings.dtype,
            device=device,
            seed=settings.seed,
            cubes=tuple(str(prepare_cube(subject, size, settings.folder / "cubes")) for subject in subjects),
            threads=settings.threads,
        )

    def attempt(*configurations: Configuration, needed_bytes: float = 0) -> Run | None:
        outcomes = run_compared(configurations, settings.folder / "logs", on_event, needed_bytes)
        runs.extend(outcome for outcome in outcomes if isinstance(outcome, Run))
        failures.extend(outcome for outcome in outcomes if isinstance(outcome, Failure))
        return outcomes[0] if isinstance(outcomes[0], Run) else None

    device = default_device().type
    budget_bytes = settings.budget_bytes
    sizes = list(settings.sizes)
    voxel_bytes = math.inf  # of a plain run, by what the last one took
    if budget_bytes is None:
        size = sizes.pop(0)
        if (first := attempt(configuration(size, None))) is not None:
            budget_bytes, voxel_bytes = first.peak_bytes, first.peak_bytes / size**3
    for size in sizes:
        if budget_bytes is None:  # what would have set it failed
            break
        plain = configuration(size, None)
        budgeted = [configuration(size, policy, budget_bytes) for policy in settings.policies]
        budgeted_bytes = budget_bytes * len(budgeted)
        in_graphs = *budgeted, configuration(size, "none")
        if voxel_bytes == math.inf:
            alone = attempt(plain)
            voxel_bytes = alone.peak_bytes / size**3 if alone is not None else math.inf
            attempt(*in_graphs, needed_bytes=budgeted_bytes + voxel_bytes * size**3)  # unswapped takes about as much
        else:
            attempt(plain, *in_graphs, needed_bytes=budgeted_bytes + 2 * voxel_bytes * size**3)
    return Study(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        data=data,
        subjects=tuple(subject.name for subject in subjects),
        machine=describe_machine(),
        budget_bytes=budget_bytes,
        runs=tuple(runs),
        failures=tuple(failures),
    )


def _subjects(settings: Settings) -> tuple[list[brats.Subject], str]:
    """The subjects to train on, and a description of them."""
    root, count = settings.data, min(settings.steps, MAX_SUBJECTS)
    if root is None:
        root = settings.folder / "subjects"
        synthetic.make_subjects(root, count)
    kind = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"
    return brats.find_subjects(root)[:count], kind


def describe_machine() -> Machine:
    """Describes this machine and checkout."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return Machine(
        cpu=model,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        torch=torch.__version__,
        python=platform.python_version(),
        commit=_commit(),
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _commit() -> str:
    """Return the commit of the running code, with a hash of the changes if files differ from it, results aside.

    "unknown" outside of its checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is installed below another checkout
        changes = git("diff", "HEAD", "--", ":/", ":(top,exclude)benchmarks/results")
        digest = hashlib.sha256(changes.encode()).hexdigest()[:8]
        return git("rev-parse", "HEAD") + (f"+changes-{digest}" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
