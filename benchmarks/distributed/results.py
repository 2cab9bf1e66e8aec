"""The results file: the outcomes of a recipe's ranks, with machine and commit."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import cattrs
import torch

from benchmarks.compact import to_json
from benchmarks.distributed.prediction.network import Network
from benchmarks.distributed.ranks import Ranks
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import Machine, describe_machine
from lmswap.hardware.device import describe_device

SCHEMA = "lmswap.distributed/1"

Recipe = Literal["resnet50", "allreduce", "unet3d", "scale", "efficiency"]
Basis = Literal["measured", "predicted"]


@dataclass(frozen=True)
class Training:
    """What ranks did that trained together, or what the simulator says that they would do.

    ``batch`` is a rank's, ``name`` what was trained; ``budget_bytes`` None is plain torch. ``step_seconds`` is the
    median over steps of the slowest rank, ``peak_bytes`` the highest of the ranks, as `benchmarks.unet3d.memory`
    counts them; ``swapped_bytes`` left a device in a step. ``bits`` are a digest of losses and weights, ``accuracy`` is
    top-1 in validation. What a simulator does not say is None.
    """

    name: str
    ranks: int
    batch: int
    budget_bytes: int | None
    step_seconds: float
    peak_bytes: int | None
    swapped_bytes: int | None
    bits: str | None
    accuracy: float | None
    basis: Basis = "measured"

    @property
    def images_per_second(self) -> float:
        """Images per second of all ranks together."""
        return self.ranks * self.batch / self.step_seconds


@dataclass(frozen=True)
class Reduction:
    """One way to sum ``tensors`` tensors of ``nbytes`` together over ``ranks`` ranks in nodes of ``per_node``.

    ``seconds`` are the slowest rank's, median of several; ``difference`` is the largest from the flat sum, over the
    largest number of that.
    """

    way: str
    ranks: int
    per_node: int
    tensors: int
    nbytes: int
    seconds: float
    difference: float
    basis: Basis = "measured"


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of ``ranks`` that sum their gradients, in seconds beyond a step that sums nothing.

    ``extra_seconds`` is how much longer the step is; ``unhidden_seconds`` of that no plan could hide, by its bound.
    """

    ranks: int
    all_reduce_seconds: float
    extra_seconds: float
    unhidden_seconds: float


@dataclass(frozen=True)
class Efficiency:
    """Ranks that train the same under a budget, in turns: with DistributedDataParallel and each for itself.

    Seconds are by turn, of the slowest rank; ``has_cores`` says whether each has cores of its own. ``network`` is what
    was measured of sums alone and beside compute, None for one rank; ``predicted`` is made of it and the plan, for
    these ranks; ``larger`` for more of them, on machines that each have so many ranks.
    """

    name: str
    ranks: int
    has_cores: bool
    budget_bytes: int
    swapped_bytes: int
    alone_seconds: tuple[float, ...]
    together_seconds: tuple[float, ...]
    network: Network | None
    predicted: Prediction
    larger: tuple[Prediction, ...] = ()

    @property
    def seconds_alone(self) -> float:
        """Median seconds of a step without all-reduce."""
        return statistics.median(self.alone_seconds)

    @property
    def seconds(self) -> float:
        """Seconds of a step with all-reduce: `seconds_alone` times the median ratio of turns, without drift."""
        pairs = zip(self.together_seconds, self.alone_seconds, strict=True)
        return self.seconds_alone * statistics.median(together / alone for together, alone in pairs)

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of a step with all-reduce."""
        return self.seconds_alone + self.predicted.extra_seconds

    @property
    def excess(self) -> float:
        """Excess over the step without all-reduce plus the part of the sums that cannot be hidden, as a share."""
        return self.seconds / (self.seconds_alone + self.predicted.unhidden_seconds) - 1


@dataclass(frozen=True)
class Origin:
    """Where measured figures come from; ``load_average`` of the last minute is the load of other processes."""

    device: str
    backend: str
    processes: int  # ranks of this machine, the last that ran
    threads: int  # of each rank
    load_average: float
    machine: Machine
    created: str

    @property
    def is_disturbed(self) -> bool:
        """Whether more was running than the ranks and what starts them.

        Alone, four ranks on two cores leave a load of 4.1; beside other programs it was 7.5 and 12.8.
        """
        return self.load_average > self.processes + self.machine.cores


@dataclass(frozen=True)
class Results:
    """The points of one recipe; those of a recipe are all of one kind."""

    recipe: Recipe
    origin: Origin | None  # None: nothing was measured
    trainings: tuple[Training, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()

    @staticmethod
    def read(path: Path) -> Results:
        """Reads what `write` wrote.

        Raises:
            DataError: it is of another schema.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema", None) != SCHEMA:
            raise DataError(f"{path} is no {SCHEMA}")
        return cattrs.structure(data, Results)

    def write(self, path: Path) -> None:
        """Writes the results as JSON, in bytes and seconds."""
        write_text(path, to_json({"schema": SCHEMA, **asdict(self)}))


def join(parts: Sequence[Results]) -> Results:
    """The points of several files of one recipe as one; their origin is that of the last that has one.

    Raises:
        DataError: they are of several recipes.
    """
    recipes = {part.recipe for part in parts}
    if len(recipes) != 1:
        raise DataError(f"one table is of one recipe, not of {', '.join(sorted(recipes))}")
    origins = [part.origin for part in parts if part.origin is not None]
    trainings = tuple(point for part in parts for point in part.trainings)
    reductions = tuple(point for part in parts for point in part.reductions)
    efficiencies = tuple(point for part in parts for point in part.efficiencies)
    return Results(parts[0].recipe, origins[-1] if origins else None, trainings, reductions, efficiencies)


def describe_origin(ranks: Ranks) -> Origin:
    """This machine, as one of the ranks sees it."""
    return Origin(
        device=describe_device(ranks.device).name,
        backend=ranks.backend,
        processes=ranks.local_size,
        threads=torch.get_num_threads(),
        load_average=os.getloadavg()[0],
        machine=describe_machine(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def slowest_median(step_seconds: Sequence[Sequence[float]]) -> float:
    """The largest, over ranks, of the median step seconds."""
    return max(map(statistics.median, step_seconds))
