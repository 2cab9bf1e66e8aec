"""Runs several configurations, each in a fresh process, and says what the comparison shows."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from lmswap.bench.compact import to_json
from lmswap.bench.unet3d import brats, synthetic
from lmswap.bench.unet3d.configuration import Configuration, Kind
from lmswap.bench.unet3d.fresh import OnEvent, RunFailed, run_fresh
from lmswap.bench.unet3d.measured import Run
from lmswap.bench.unet3d.network import Head
from lmswap.bench.unet3d.preprocess import prepare_cube
from lmswap.hardware.device import default_device

SCHEMA = "lmswap.unet3d/1"
MAX_SUBJECTS = 3  # a comparison of a few steps takes the first ones only, and normalises over these


@dataclass(frozen=True)
class Settings:
    """What is to be compared. ``budget_bytes`` None: the peak that the first size takes plainly."""

    sizes: tuple[int, ...]
    steps: int
    budget_bytes: int | None
    policy: str
    head: Head
    dtype: Literal["fp32", "bf16"]
    seed: int
    data: Path | None  # a BraTS folder; None: made subjects
    folder: Path  # for made subjects, cubes and logs


@dataclass(frozen=True)
class Failure:
    """A configuration that did not finish, and why."""

    configuration: Configuration
    message: str


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
        """Writes everything as JSON, schema "lmswap.unet3d/1", in bytes and seconds."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json({"schema": SCHEMA, **asdict(self)}))


def compare(settings: Settings, on_event: OnEvent, *, command: str) -> Study:
    """Trains each size plainly, and under the budget swapped and, in the same graphs, unswapped.

    Where the first size sets the budget it is trained plainly only; should that fail, nothing else is tried. Any other
    run that fails is kept as a failure, and the rest goes on.

    Raises:
        DataError: the scans cannot be used.
    """
    subjects, data = _subjects(settings)
    runs: list[Run] = []
    failures: list[Failure] = []

    def attempt(
        size: int, policy: str | None, budget_bytes: int | None = None, cap_bytes: int | None = None
    ) -> Run | None:
        configuration = Configuration(
            size=size,
            steps=settings.steps,
            policy=policy,
            budget_bytes=budget_bytes,
            cap_bytes=cap_bytes if device == "cuda" else None,
            head=settings.head,
            dtype=settings.dtype,
            device=device,
            seed=settings.seed,
            cubes=tuple(str(prepare_cube(subject, size, settings.folder / "cubes")) for subject in subjects),
        )
        try:
            runs.append(run_fresh(configuration, settings.folder / "logs", on_event))
        except RunFailed as failure:
            failures.append(Failure(configuration, str(failure)))
            on_event(configuration, {"event": "failed", "message": str(failure)})
            return None
        return runs[-1]

    device = default_device().type
    # The cap stands for a smaller card: one that just holds what torch's allocator took for the first size.
    budget_bytes = cap_bytes = settings.budget_bytes
    sizes = list(settings.sizes)
    if budget_bytes is None:
        first = attempt(sizes.pop(0), None)
        if first is not None:
            budget_bytes = cap_bytes = first.peak_bytes
    for size in sizes if budget_bytes is not None else ():
        attempt(size, None)
        attempt(size, settings.policy, budget_bytes, cap_bytes)
        attempt(size, "none")
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
    """The subjects to train on, and what they are."""
    root, count = settings.data, min(settings.steps, MAX_SUBJECTS)
    if root is None:
        root = settings.folder / "subjects"
        synthetic.make_subjects(root, count)
    kind = synthetic.DATA_KIND if synthetic.is_made(root) else "BraTS layout, as given"
    return brats.find_subjects(root)[:count], kind


def describe_machine() -> Machine:
    """What this machine and this checkout are."""
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
    """The commit of the code that runs, with "+changes" if files differ from it; "unknown" outside of its checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is installed below somebody's own checkout
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
