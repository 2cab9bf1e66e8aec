"""What was found, and where: a model's outcomes with the machine and the errors of the predictions, as a JSON file."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import Cell, Outcome, Prediction
from benchmarks.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device

SCHEMA = "lmswap.peers/4"


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
        """Writes one outcome a line."""
        lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in self.outcomes)
        head = json.dumps({"schema": SCHEMA, "origin": self.origin, "errors": self.errors()})[1:-1]
        path.write_text(f'{{{head}, "outcomes": [\n{lines}\n]}}\n', encoding="utf-8")


def read_results(path: Path) -> Results:
    """Reads what `Results.write` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Results(data["origin"], tuple(_outcome(record) for record in data["outcomes"]))


def describe_origin(device: str, command: str) -> dict[str, Any]:
    """Device, driver, torch, commit and command, in words and numbers."""
    import torch  # noqa: PLC0415

    driver = None
    if device == "cuda":
        import pynvml  # noqa: PLC0415

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    return {
        **asdict(describe_machine()),
        "device": str(describe_device(torch.device(device))),
        "driver": driver,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],  # of the last minute before the run: how busy others kept the machine
        "command": command,
    }


def _outcome(record: dict[str, Any]) -> Outcome:
    prediction = record["prediction"]
    cell, found = Cell(**record["cell"]), Prediction(**prediction) if prediction else None
    lists = {name: tuple(record[name]) for name in ("step_seconds", "bits")}
    return Outcome(**{**record, **lists, "cell": cell, "prediction": found})
