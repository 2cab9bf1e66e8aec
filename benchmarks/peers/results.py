"""What was found, and where: a model's outcomes with the machine and the errors of the predictions, as a JSON file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.cell import Bits, Cell, Outcome, Prediction
from lmswap.bench.unet3d.study import describe_machine
from lmswap.hardware.device import describe_device

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
        """Writes one outcome a line, with the bits that are not those of the first, which has all."""
        first, *others = self.outcomes
        records = [asdict(first), *({**asdict(other), "bits": _other_bits(other, first)} for other in others)]
        lines = ",\n".join(map(json.dumps, records))
        head = json.dumps({"schema": SCHEMA, "origin": self.origin, "errors": self.errors()})[1:-1]
        path.write_text(f'{{{head}, "outcomes": [\n{lines}\n]}}\n', encoding="utf-8")


def read_results(path: Path) -> Results:
    """Reads what `Results.write` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    first = data["outcomes"][0]["bits"]
    return Results(data["origin"], tuple(_outcome(record, first) for record in data["outcomes"]))


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


def _other_bits(outcome: Outcome, first: Outcome) -> list[Bits]:
    return [dict(mine.items() - its.items()) for mine, its in zip(outcome.bits, first.bits, strict=False)]


def _outcome(record: dict[str, Any], first: Sequence[Any]) -> Outcome:
    prediction = record["prediction"]
    cell, found = Cell(**record["cell"]), Prediction(**prediction) if prediction else None
    lists = {"step_seconds": tuple(record["step_seconds"]), "others": tuple(record.get("others", ()))}
    bits = tuple(_bits(its) | _bits(mine) for mine, its in zip(record["bits"], first, strict=False))
    return Outcome(**{**record, **lists, "bits": bits, "cell": cell, "prediction": found})


def _bits(digests: dict[str, str] | str) -> dict[str, str]:
    if isinstance(digests, dict):
        return digests
    return dict(zip(("loss", "gradients"), digests.split(), strict=True))  # up to lmswap.peers/4: one of all gradients
