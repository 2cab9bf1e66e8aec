"""Trains drawn networks at "50%", at every budget from the least to their peak and at "50%" again; judges each run.

    python -m benchmarks.judge --networks 12 --spacing 0.05
    python -m benchmarks.judge --named gpt monai_unet

Bits must be plain torch's, the budget be kept, the last step's peak be predicted within 2 %, and where something is
swapped or recomputed at least 92 % of the budget be used. Two goals: on a quiet machine seconds are predicted within
8 %; the least budget, which a refusal names, exceeds what plain torch takes in a process of its own by no more than
8 MiB or 5 %. Results are written after each run; networks that the file has from earlier runs stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compact import to_json
from benchmarks.judge.networks import NAMED, network_called
from benchmarks.unet3d.commands.arguments import positive
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.fresh import RunFailed
from benchmarks.unet3d.study import describe_machine
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parents[1] / "results" / "judge_cpu.json"
COMMAND = [sys.executable, "-m", "benchmarks.judge.run"]
FIRST_SEED = 200  # margins were chosen by networks 0 to 11, 104, 105 and 109, which are no evidence any more
STEPS = 8  # the plan is final from the sixth on
USED, PREDICTED_BYTES, PREDICTED_SECONDS = 0.92, 0.02, 0.08
SHARE = "50%"
QUIET_LOAD = 1.5  # the load average up to which the machine does little else than one run
_MAX_SECONDS = 900  # of a run; one takes some 15
_STARTS_BYTES = 4 * 2**20  # by which the least budget differs from start to start, as docs/budget.md says
_SLACK_BYTES, _SLACK = 8 * 2**20, 0.05


@dataclass(frozen=True)
class Verdict:
    """One run: what it was given and took, and what is wrong with it, in words."""

    budget: int | str
    figures: dict[str, Any]
    broken: tuple[str, ...]  # promises
    missed: tuple[str, ...]  # goals


def judge(name: str, budget: int | str, plain: dict[str, Any]) -> Verdict:
    """Trains the network ``name`` within a budget, and holds it against the ``plain`` run."""
    try:
        figures = _run(name, STEPS, str(budget))
    except RunFailed as failure:
        return Verdict(budget, {}, (str(failure),), ())
    if "refused" in figures:
        return Verdict(budget, figures, (f"refused: {figures['refused']}",), ())
    figures["load"] = os.getloadavg()[0]
    broken, missed = [], []
    if figures["digest"] != plain["digest"]:
        broken.append("other bits than plain torch")
    peak_bytes = max(figures["highest_peak_bytes"], figures["grown_bytes"])
    if peak_bytes > figures["budget_bytes"]:
        broken.append(f"held {format_bytes(peak_bytes)}")
    used = figures["measured_peak_bytes"] / figures["budget_bytes"]
    if (figures["swapped_out_bytes"] or figures["recomputed_bytes"]) and used < USED:
        broken.append(f"used {used:.1%}")
    error = figures["predicted_peak_bytes"] / figures["measured_peak_bytes"] - 1
    if abs(error) > PREDICTED_BYTES:
        broken.append(f"peak predicted {error:+.1%}")
    error = figures["predicted_seconds"] / figures["measured_seconds"] - 1
    if abs(error) > PREDICTED_SECONDS and figures["load"] <= QUIET_LOAD:
        missed.append(f"seconds predicted {error:+.1%}")
    return Verdict(budget, figures, tuple(broken), tuple(missed))


def judge_network(name: str, spacing: float) -> Iterator[dict[str, Any]]:
    """Judge the network ``name`` at "50%" and at `budgets`.

    Yields:
        What is known of it, with one more of its "runs" each time.

    Raises:
        RunFailed: it does not train without a budget, or finds no least one.
    """
    plain, least = _run(name, STEPS), _run(name, 1, "least")
    plain_bytes, unplanned_bytes = plain["grown_bytes"], least["unplanned_bytes"]
    least_bytes = _named_by_refusal(name, least["least_bytes"])
    print_result(
        f"{name}: {network_called(name).description}. Plain torch {format_bytes(plain_bytes)}, least budget "
        f"{format_bytes(least_bytes)}, unplanned {format_bytes(unplanned_bytes)}"
    )
    missed = []
    if least_bytes > plain_bytes + max(_SLACK_BYTES, _SLACK * plain_bytes):
        missed.append(f"the least budget is {format_bytes(least_bytes - plain_bytes)} more than plain torch takes")
        print_result(f"   {missed[-1]}")
    found = {
        "name": name,
        "network": network_called(name).description,
        "machine": asdict(describe_machine()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "spacing": spacing,
        "plain_bytes": plain_bytes,
        "least_bytes": least_bytes,
        "unplanned_bytes": unplanned_bytes,
        "missed": missed,
        "runs": [],
    }
    for budget in (SHARE, *budgets(least_bytes, unplanned_bytes, spacing), SHARE):  # the last one by cached plans
        verdict = judge(name, budget, plain)
        print_result(f"   {_line(verdict)}")
        found["runs"].append(asdict(verdict))
        yield found


def budgets(least_bytes: int, unplanned_bytes: int, spacing: float) -> list[int]:
    """Return the budgets from the least to what the step takes unplanned, by ``spacing`` of that; one if it is none."""
    room_bytes = max(0, unplanned_bytes - least_bytes)
    number = round(1 / spacing) + 1 if room_bytes else 1
    return [least_bytes + _STARTS_BYTES + round(min(1.0, each * spacing) * room_bytes) for each in range(number)]


def _named_by_refusal(name: str, nbytes: int) -> int:
    """The budget that a refusal of less than about ``nbytes`` says would do, as users find it."""
    figures: dict[str, Any] = {}
    while "refused" not in figures:
        nbytes = nbytes * 9 // 10
        figures = _run(name, 1, str(nbytes))
    return int(figures["needed_bytes"])


def _line(verdict: Verdict) -> str:
    figures, budget = verdict.figures, verdict.budget
    wrong = "; ".join((*(f"BROKEN: {each}" for each in verdict.broken), *verdict.missed)) or "ok"
    given = budget if isinstance(budget, str) else format_bytes(budget)
    if "measured_peak_bytes" not in figures:
        return f"{given}: {wrong}"
    moved = figures["swapped_out_bytes"] + figures["recomputed_bytes"]
    return (
        f"{given}: peak {format_bytes(figures['measured_peak_bytes'])} of {format_bytes(figures['budget_bytes'])}, "
        f"{format_bytes(moved)} swapped or recomputed: {wrong}"
    )


def _run(name: str, steps: int, *budget: str) -> dict[str, Any]:
    """What a process of its own finds.

    Raises:
        RunFailed: it fails, or does not end.
    """
    command = [*COMMAND, name, str(steps), *budget]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command[1:])} did not end within {_MAX_SECONDS} s") from None
    if done.returncode:
        raise RunFailed(f"{' '.join(command[1:])} failed, exit code {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Judges the networks and writes what was found; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge", description=__doc__)
    parser.add_argument("--networks", type=positive, default=12, metavar="N", help="how many are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=FIRST_SEED, metavar="S", help="of the first one (%(default)s)")
    parser.add_argument(
        "--named", nargs="+", choices=NAMED, metavar="NAME", help=f"of {', '.join(NAMED)}; none is drawn"
    )
    parser.add_argument(
        "--spacing", type=float, default=0.05, metavar="SHARE", help="between budgets, of least to peak (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE", help="(%(default)s)")
    options = parser.parse_args(argv)
    if not 0 < options.spacing <= 1:
        parser.error(f"--spacing must be more than 0 and at most 1, not {options.spacing:g}")
    return run_to_end("judge", lambda: _judge_all(options))


def _judge_all(options: argparse.Namespace) -> int:
    names = options.named or [str(seed) for seed in range(options.seed, options.seed + options.networks)]
    stored = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else []
    networks = {each["name"]: each for each in stored}
    for name in names:
        for found in judge_network(name, options.spacing):
            networks[name] = found
            write_text(options.output, to_json([networks[each] for each in sorted(networks)]))
    runs = [run for name in names for run in networks[name]["runs"]]
    num_broken, num_missed = (sum(bool(run[what]) for run in runs) for what in ("broken", "missed"))
    print_result(f"{len(runs)} runs: {num_broken} broke a promise, {num_missed} missed a goal")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
