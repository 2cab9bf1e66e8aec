"""Comparison of plans: stored outcomes + new ones → changes, and cases in which another policy beats `auto`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.programs.replay import Case, Outcome, PlanFigures
from benchmarks.unet3d.files import write_text

SCHEMA = "lmswap.programs/1"
_SAME = 0.001  # relative: smaller differences of seconds and peak are none
# Another CPU's exp and pow may differ in a last bit, and send the search another way: other seeds end up to 2 % apart.
_WORSE = 0.03
_SLOWER_PLANNING = 2.0
_PLANNING_NOISE_SECONDS = 0.5


class Verdict(StrEnum):
    """Of a case: its plan is better, as good or worse than the stored one, or as good but took longer to make."""

    NEW = "new"
    SAME = "same"
    BETTER = "better"
    WORSE = "worse"
    SLOWER_PLANNING = "slower planning"


@dataclass(frozen=True)
class Change:
    """A verdict, and the figures behind it in words."""

    verdict: Verdict
    text: str = ""


def change(stored: Outcome | None, now: Outcome) -> Change:
    """Compares two outcomes of one case. A peak is reported and not judged: the budget may be used in full."""
    if stored is None:
        return Change(Verdict.NEW)
    if stored.plan is None or now.plan is None:
        if stored.plan is None and now.plan is None:
            return _planning_change(stored, now)
        return Change(Verdict.BETTER, "fits now") if now.plan else Change(Verdict.WORSE, "does not fit any more")
    seconds = now.plan.step_seconds / stored.plan.step_seconds - 1
    if abs(seconds) > _SAME:
        verdict = Verdict.BETTER if seconds < 0 else Verdict.WORSE if seconds > _WORSE else Verdict.SAME
        return Change(verdict, f"step {seconds:+.2%}")
    peak = now.plan.peak_bytes / stored.plan.peak_bytes - 1
    found = _planning_change(stored, now)
    return replace(found, text=f"peak {peak:+.2%} {found.text}".rstrip()) if abs(peak) > _SAME else found


def _planning_change(stored: Outcome, now: Outcome) -> Change:
    before, after = stored.planning_seconds, now.planning_seconds
    if after > _SLOWER_PLANNING * before and after - before > _PLANNING_NOISE_SECONDS:
        return Change(Verdict.SLOWER_PLANNING, f"planned in {after:.1f} s, was {before:.1f} s")
    return Change(Verdict.SAME)


def faster_than_auto(outcomes: Mapping[Case, Outcome]) -> list[Case]:
    """The cases in which another policy has a faster plan than `auto`, or one where `auto` has none.

    Cases without an outcome of `auto` beside them are left out.
    """
    found = []
    for case, outcome in outcomes.items():
        auto = outcomes.get(replace(case, policy="auto"))
        if outcome.plan is None or auto is None or auto is outcome:
            continue
        # The same plan's seconds, summed in another order, may differ in the last bits.
        if auto.plan is None or outcome.plan.step_seconds < auto.plan.step_seconds * (1 - 1e-12):
            found.append(case)
    return found


def read_outcomes(path: Path) -> dict[Case, Outcome]:
    """The stored outcomes by case; empty if ``path`` does not exist."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise SystemExit(f"{path} has schema {data['schema']!r}, not {SCHEMA!r}: store it again")
    return {outcome.case: outcome for outcome in map(_outcome, data["outcomes"])}


def write_outcomes(path: Path, outcomes: Mapping[Case, Outcome], origin: Mapping[str, str]) -> None:
    """Writes all ``outcomes``, one a line; ``origin`` says where and when they were made."""
    lines = ",\n".join(json.dumps(asdict(outcome), ensure_ascii=False) for outcome in outcomes.values())
    head = json.dumps({"schema": SCHEMA, **origin}, ensure_ascii=False)[1:-1]
    write_text(path, f'{{{head}, "outcomes": [\n{lines}\n]}}\n')


def _outcome(record: dict[str, Any]) -> Outcome:
    plan = record["plan"]
    return Outcome(**{**record, "case": Case(**record["case"]), "plan": PlanFigures(**plan) if plan else None})
