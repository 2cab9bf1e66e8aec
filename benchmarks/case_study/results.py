"""The results file: every stage of the case study that has finished; the page is made from it alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import cattrs

from benchmarks.case_study.published import EpochRow
from benchmarks.compact import to_json
from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.measured import Failure, Run
from benchmarks.unet3d.network import Head
from benchmarks.unet3d.recipe import Dtype
from benchmarks.unet3d.scores import REGIONS, Score
from benchmarks.unet3d.study import Machine
from lmswap.ir.timeline import Span

SCHEMA = "lmswap.case_study/2"


@dataclass(frozen=True)
class Settings:
    """What is measured. ``small`` just fits the budget, ``large`` is what the page is about; ``ladder``: other sizes.

    ``budget_bytes`` None: the plain peak of ``small``; ``data`` None: synthetic subjects. Every run warms up, then
    times ``timed_steps`` steps; what is compared runs ``repeats`` times, in turns. ``evaluation`` is a folder of
    `python -m benchmarks.unet3d evaluate`.
    """

    small: int
    large: int
    ladder: tuple[int, ...]
    device: str
    replicas: int
    repeats: int
    timed_steps: int
    budget_bytes: int | None
    head: Head
    dtype: Dtype
    seed: int
    data: str | None
    evaluation: str | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, ascending."""
        return tuple(sorted({self.small, self.large, *self.ladder}))


@dataclass(frozen=True)
class Origin:
    """Where the figures come from. ``device`` and ``driver`` are as `lmswap.hardware.device` names them."""

    command: str
    created: str
    data: str
    device: str
    driver: str
    machine: Machine


@dataclass(frozen=True)
class Boxes:
    """Sides of the boxes around the brains, in voxels: (X, Y, Z) of each subject."""

    sides: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Ladder:
    """Each size without a budget and under the small size's; the runs of a size alternate, step by step if they can."""

    budget_bytes: int | None
    cap_bytes: int | None  # on CUDA: what torch's allocator was held to, as a card of that size would
    runs: tuple[Run, ...]
    failures: tuple[Failure, ...]

    @property
    def limits(self) -> dict[str, int | None]:
        """Fields of a configuration that limit a training to the small size's memory, in bytes."""
        return {"budget_bytes": self.budget_bytes, "cap_bytes": self.cap_bytes}

    def of(self, size: int, kind: str) -> tuple[Run, ...]:
        """The runs of a size and kind, in order of repeats."""
        return tuple(run for run in self.runs if (run.configuration.size, run.configuration.kind) == (size, kind))


@dataclass(frozen=True)
class LinkRuns:
    """The large size over one link; ``name`` is a system's key or one of `lmswap.ir.emulation.PRESETS`.

    ``ratio`` is of transfer to compute. Where a device's own link is too slow for the wanted one it is used as it is:
    then ``link`` is None, and ``ratio`` what that gives.
    """

    name: str
    bytes_per_second: float
    link: str | None
    tier: str
    ratio: float
    runs: tuple[Run, ...] = ()
    failures: tuple[Failure, ...] = ()

    def of(self, policy: str) -> tuple[Run, ...]:
        """The runs of a policy, in order of repeats."""
        return tuple(run for run in self.runs if run.configuration.policy == policy)


@dataclass(frozen=True)
class Links:
    """The comparison of links, beside the same graphs unswapped; runs alternate, step by step if they can.

    A link's ratio is ``saved_bytes`` over its rate and ``forward_seconds``.
    """

    saved_bytes: int
    forward_seconds: float
    unswapped: tuple[Run, ...]
    links: tuple[LinkRuns, ...]
    failures: tuple[Failure, ...]

    def of(self, name: str) -> LinkRuns | None:
        """The runs over a link."""
        return next((link for link in self.links if link.name == name), None)


@dataclass(frozen=True)
class Together:
    """Independent trainings that ran at the same time. ``seconds`` are the median steps while all of them trained."""

    row: EpochRow
    system: str | None  # None: without swapping the link does not matter
    runs: tuple[Run, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Replicas:
    """Trainings beside each other, and, as their first rows, those of the stages before that trained alone."""

    devices: int
    together: tuple[Together, ...]
    failures: tuple[Failure, ...]

    def of(self, row: EpochRow, system: str) -> Together | None:
        """The trainings of a row on a system."""
        return next((t for t in self.together if t.row == row and t.system in (None, system)), None)


@dataclass(frozen=True)
class Prediction:
    """One step by the simulator; ``spans`` are kept where the page draws them.

    ``free_seconds`` is the step with unlimited memory, ``bound_seconds`` what no plan for this order of ops beats.
    """

    program: str
    machine: str
    machine_name: str
    method: str
    budget_bytes: int | None
    step_seconds: float
    free_seconds: float
    bound_seconds: float
    utilization: float
    out_bytes: int
    in_bytes: int
    out_bytes_per_second: float | None
    in_bytes_per_second: float | None
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Predictions:
    """The case study on machines that need not be there."""

    predictions: tuple[Prediction, ...]

    def find(self, machine: str, method: str) -> Prediction:
        """The prediction for a machine by a method."""
        (found,) = (p for p in self.predictions if (p.machine, p.method) == (machine, method))
        return found


@dataclass(frozen=True)
class Evaluation:
    """Dice scores of trained models: the content of ``folder``, and a description of their data."""

    folder: str
    data: str
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Results:
    """Settings, origin, and the stages that have finished; the others are None."""

    settings: Settings
    origin: Origin
    boxes: Boxes | None = None
    predictions: Predictions | None = None
    ladder: Ladder | None = None
    links: Links | None = None
    replicas: Replicas | None = None
    evaluation: Evaluation | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Runs of any stage that did not finish."""
        stages = (self.ladder, self.links, *(self.links.links if self.links else ()), self.replicas)
        return tuple(failure for stage in stages if stage is not None for failure in stage.failures)

    def write(self, path: Path) -> None:
        """Writes schema "lmswap.case_study/2", in bytes and seconds; a reader sees the old file or the new one."""
        write_text(path, to_json({"schema": SCHEMA, **_CONVERTER.unstructure(self)}))

    @staticmethod
    def from_fields(data: Mapping[str, Any]) -> Results:
        """Rebuilds results from the parsed JSON of a results file."""
        return _CONVERTER.structure({name: value for name, value in data.items() if name != "schema"}, Results)

    @staticmethod
    def read(path: Path) -> Results:
        """Reads what `write` wrote.

        Raises:
            DataError: no such file, or not of this schema; the message says what is wrong with it.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise DataError(f"{path} is not a results file: its schema is not '{SCHEMA}'")
            return Results.from_fields(data)
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read the results in {path}: {error}") from error
        except cattrs.BaseValidationError as error:
            damage = "; ".join(cattrs.transform_error(error)[:3])
            raise DataError(f"the results in {path} are damaged: {damage}") from error


_CONVERTER = cattrs.Converter(forbid_extra_keys=True)


def _unstructure_score(score: Score) -> dict[str, Any]:
    """Fields of ``score`` for JSON, which lacks NaN: None for a region absent from both truth and prediction."""
    nan = {region: None for region in REGIONS if math.isnan(score.of(region))}
    return asdict(score) | nan


def _structure_score(data: dict[str, Any], _: type[Score]) -> Score:
    fields: dict[str, Any] = {name: math.nan if value is None else value for name, value in data.items()}
    return Score(**fields)


_CONVERTER.register_unstructure_hook(Score, _unstructure_score)
_CONVERTER.register_structure_hook(Score, _structure_score)


def without_curves(run: Run, *, keep_spans: bool = False) -> Run:
    """``run`` as stored in a results file: without memory curves, and without spans unless ``keep_spans``."""
    if run.swapping is None:
        return replace(run, memory=())
    swapping = replace(run.swapping, tensor_memory=(), spans=run.swapping.spans if keep_spans else ())
    return replace(run, memory=(), swapping=swapping)
