"""What was found, and where: outcomes with the machine and the commit of each, as one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.conformance.check import Figures, Finding
from benchmarks.conformance.run import PACKAGES, Case, Outcome

SCHEMA = "lmswap.conformance/1"


@dataclass(frozen=True)
class Results:
    """All outcomes; ``origin`` says on what machine the last of them were made, with what, and by which command."""

    origin: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    def with_newer(self, outcome: Outcome) -> Results:
        """These results with ``outcome`` in the place of an older one of the same case, by package and name."""
        packages = list(PACKAGES)
        outcomes = [*(known for known in self.outcomes if known.case != outcome.case), outcome]
        outcomes.sort(key=lambda each: (packages.index(each.case.package), each.case.model.lower()))
        return replace(self, outcomes=tuple(outcomes))

    def write(self, path: Path) -> None:
        """Writes one outcome a line."""
        lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in self.outcomes)
        head = json.dumps({"schema": SCHEMA, "origin": self.origin})[1:-1]
        path.write_text(f'{{{head}, "outcomes": [\n{lines}\n]}}\n', encoding="utf-8")


def read_results(path: Path) -> Results:
    """Reads what `Results.write` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Results(data["origin"], tuple(_outcome(record) for record in data["outcomes"]))


def _outcome(record: dict[str, Any]) -> Outcome:
    found = record["finding"]
    before, after = (Figures(**found[when]) if found[when] else None for when in ("before", "after"))
    finding = Finding(**{**found, "before": before, "after": after, "notes": tuple(found["notes"])})
    return Outcome(**{**record, "case": Case(**record["case"]), "finding": finding})
