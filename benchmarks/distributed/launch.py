"""Starts a recipe's ranks by torchrun, each of its ways in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.distributed.results import Results, Training
from benchmarks.unet3d.brats import DataError
from lmswap.errors import LmswapError
from lmswap.ir.bytesize import parse_bytes


class RanksFailed(LmswapError):
    """A recipe's ranks did not finish; each has said why."""


@dataclass(frozen=True)
class Launcher:
    """Starts ``torchrun`` on this machine; after a failure up to ``restarts`` times again.

    ``max_ranks`` share the cores: ranks have as many threads each wherever fewer of them run, so that a rank's cores
    stand for a device of its own.
    """

    max_ranks: int
    restarts: int = 0

    def run(self, recipe: str, ranks: int, options: Sequence[str]) -> Results:
        """Runs a recipe's module on some ranks.

        Raises:
            RanksFailed: one of them did not finish.
        """
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "results.json"
            command = self.command(recipe, ranks, options, record)
            if subprocess.run(command, env=self.environment(), check=False).returncode:
                raise RanksFailed(f"{recipe} on {ranks} rank(s) did not finish; why is said above, by rank")
            return Results.read(record)

    def command(self, recipe: str, ranks: int, options: Sequence[str], record: Path) -> list[str]:
        """The command that runs a recipe on ``ranks`` processes, the first of which writes results to ``record``."""
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", f"--max-restarts={self.restarts}"),
            *("-m", f"benchmarks.distributed.{recipe}", *options, "--record", str(record)),
        ]

    def environment(self) -> dict[str, str]:
        """The environment variables of `command`."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.max_ranks)
        return {"OMP_NUM_THREADS": str(threads), **os.environ}


def compare(
    launcher: Launcher, recipe: str, ranks: Sequence[int], budget: str | None, options: Sequence[str]
) -> Iterator[Results]:
    """Trains on each number of ranks plainly, then under ``budget``: bytes, or a share of the plain peak ("50%").

    Raises:
        RanksFailed: some did not finish.
    """
    for num in ranks:
        plain = launcher.run(recipe, num, options)
        yield plain
        if budget is not None:
            nbytes = budget_bytes(budget, plain.trainings[0])
            yield launcher.run(recipe, num, [*options, "--budget", str(nbytes)])


def scale(launcher: Launcher, ranks: int, budget: str, batch: int, options: Sequence[str]) -> Iterator[Results]:
    """Trains ResNet-50 with a ``ranks``-th of a batch on one rank, then with all of it: on one rank, and on so many.

    ``budget`` of the larger batch on one rank is bytes, or a share of what the smaller takes plainly.

    Raises:
        RanksFailed: some did not finish.
    """
    share = [*options, "--batch", str(batch // ranks)]
    first = launcher.run("resnet50", 1, share)
    yield replace(first, recipe="scale")
    nbytes = budget_bytes(budget, first.trainings[0])
    up = launcher.run("resnet50", 1, [*options, "--batch", str(batch), "--budget", str(nbytes)])
    yield replace(up, recipe="scale")
    yield replace(launcher.run("resnet50", ranks, share), recipe="scale")


def budget_bytes(budget: str, plain: Training) -> int:
    """Bytes of a budget that may be a share of what a rank took plainly.

    Raises:
        DataError: it is a share that leaves nothing.
    """
    if not budget.endswith("%"):
        return parse_bytes(budget)
    try:
        share = float(budget.removesuffix("%")) / 100
    except ValueError as error:
        raise DataError(
            f'--budget takes bytes ("6GiB") or a share of the plain peak ("50%"), not {budget!r}'
        ) from error
    assert plain.peak_bytes is not None
    return parse_bytes(int(share * plain.peak_bytes))
