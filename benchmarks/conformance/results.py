"""Outcomes with the machine and the commit of each, as one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.conformance.check import PATHS, Comparison, Figures, Finding
from benchmarks.conformance.run import PACKAGES, Case, Outcome
from benchmarks.unet3d.files import write_text

SCHEMA = "lmswap.conformance/2"


@dataclass(frozen=True)
class Results:
    """All outcomes; ``origin`` says on what machine the last of them were made, with what, and by which command."""

    origin: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    def with_newer(self, outcome: Outcome) -> Results:
        """These results with ``outcome`` in the place of an older one of the same case, by package, name and path."""
        outcomes = [*(known for known in self.outcomes if known.case != outcome.case), outcome]
        outcomes.sort(key=lambda each: _place(each.case))
        return replace(self, outcomes=tuple(outcomes))

    def write(self, path: Path) -> None:
        """Writes JSON with one outcome per line; bytes and seconds."""
        lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in self.outcomes)
        head = json.dumps({"schema": SCHEMA, "origin": self.origin})[1:-1]
        write_text(path, f'{{{head}, "outcomes": [\n{lines}\n]}}\n')


def read_results(path: Path) -> Results:
    """Reads what `Results.write` wrote.

    Raises:
        ValueError: it was written in another form.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(
            f"{path} is of schema '{data['schema']}', and outcomes of '{SCHEMA}' cannot be added to it: run all "
            "packages without --models, or give another --output"
        )
    return Results(data["origin"], tuple(_outcome(record) for record in data["outcomes"]))


def _place(case: Case) -> tuple[int, str, int]:
    return [*PACKAGES].index(case.package), case.model.lower(), [*PATHS].index(case.path)


def _outcome(record: dict[str, Any]) -> Outcome:
    found = record["finding"]
    before, after = (Figures(**found[when]) if found[when] else None for when in ("before", "after"))
    comparisons = tuple(
        Comparison(**{**comparison, "figures": Figures(**comparison["figures"])}) for comparison in found["comparisons"]
    )
    compared = {"before": before, "after": after, "comparisons": comparisons, "notes": tuple(found["notes"])}
    return Outcome(**{**record, "case": Case(**record["case"]), "finding": Finding(**{**found, **compared})})
