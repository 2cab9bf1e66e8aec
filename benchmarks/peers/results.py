"""A model's outcomes with the machine and the errors of the predictions, as a JSON file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import Bits, Cell, Outcome, Prediction
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import format_seconds

SCHEMA = "lmswap.peers/5"


@dataclass(frozen=True)
class Results:
    """All outcomes of one model; ``origin`` says on what machine and by which command."""

    origin: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    def errors(self) -> dict[str, float | None]:
        """Median and largest relative error of lmswap's predicted peaks and step times, against its measured ones."""
        found = [outcome.prediction for outcome in self.outcomes if outcome.prediction is not None]
        peaks = [abs(p.peak_bytes / p.measured_peak_bytes - 1) for p in found]
        seconds = [abs(p.seconds / p.measured_seconds - 1) for p in found]
        return {
            "median_peak_error": statistics.median(peaks) if peaks else None,
            "largest_peak_error": max(peaks, default=None),
            "median_seconds_error": statistics.median(seconds) if seconds else None,
            "largest_seconds_error": max(seconds, default=None),
        }

    def write(self, path: Path) -> None:
        """Writes JSON with one outcome per line; digests only where they differ from the first outcome's."""
        first, *others = self.outcomes
        records = [asdict(first), *({**asdict(other), "bits": _other_bits(other, first)} for other in others)]
        lines = ",\n".join(map(json.dumps, records))
        head = json.dumps({"schema": SCHEMA, "origin": self.origin, "errors": self.errors()})[1:-1]
        write_text(path, f'{{{head}, "outcomes": [\n{lines}\n]}}\n')


def read_results(path: Path) -> Results:
    """Reads what `Results.write` wrote."""
    return from_fields(json.loads(path.read_text(encoding="utf-8")))


def from_fields(data: Mapping[str, Any]) -> Results:
    """Rebuilds results from the parsed JSON of such a file."""
    first = data["outcomes"][0]["bits"]
    return Results(data["origin"], tuple(_outcome(record, first) for record in data["outcomes"]))


def describe(outcome: Outcome) -> str:
    """Describes an outcome in one line."""
    cell = outcome.cell
    at = "" if cell.percent is None else f"{cell.percent} %"
    head = f"{cell.model:<12} {cell.way:<20} {at:>5}  "
    if outcome.peak_bytes is not None and outcome.overhead is not None:
        bits = ""
        if outcome.other_from_step:
            more = f" and {len(outcome.others) - 1} more" if len(outcome.others) > 1 else ""
            bits = f"  other bits from step {outcome.other_from_step} on, in {outcome.others[0]}{more}"
        seconds = format_seconds(statistics.median(outcome.step_seconds))
        return f"{head}{format_bytes(outcome.peak_bytes):>11}  {seconds:>9}  {outcome.overhead:.2f} x{bits}"
    if outcome.needed_bytes is not None:
        return f"{head}needs {format_bytes(outcome.needed_bytes)}"
    return f"{head}failed: {outcome.detail}"


def describe_origin(device: str, command: str) -> dict[str, Any]:
    """Device, driver, torch, commit and command, in words and numbers."""
    import torch  # noqa: PLC0415

    described = describe_device(torch.device(device))
    return {
        **asdict(describe_machine()),
        "device": str(described),
        "driver": described.driver,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # of the last minute before the run: how busy others kept the machine
        "command": command,
    }


def _other_bits(outcome: Outcome, first: Outcome) -> list[Bits]:
    return [dict(mine.items() - its.items()) for mine, its in zip(outcome.bits, first.bits, strict=False)]


def _outcome(record: dict[str, Any], first: Sequence[Any]) -> Outcome:
    prediction = record["prediction"]
    cell, found = Cell(**record["cell"]), Prediction(**prediction) if prediction else None
    lists = {"step_seconds": tuple(record["step_seconds"]), "others": tuple(record["others"])}
    bits = tuple(its | mine for mine, its in zip(record["bits"], first, strict=False))
    return Outcome(**{**record, **lists, "bits": bits, "cell": cell, "prediction": found})
