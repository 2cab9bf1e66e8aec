"""Trains drawn networks at every budget from the least that is accepted to their peak, and judges each run.

    python -m benchmarks.judge --networks 12 --spacing 0.05

Bits must be plain torch's and the budget be kept. Where something is swapped or recomputed at least 92 % of the budget
should be used, the peak be predicted within 2 %, and the seconds of the last step, on a quiet machine, within 8 %. The
least budget, which a refusal names, should exceed what plain torch takes in a process of its own by no more than 8 MiB
or 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.judge.networks import draw
from benchmarks.unet3d.commands.arguments import positive
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from benchmarks.unet3d.study import describe_machine
from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.text import print_result

RESULTS = Path(__file__).parents[1] / "results" / "judge_cpu.json"
STEPS = 8  # the plan is final from the sixth on
USED, PREDICTED_BYTES, PREDICTED_SECONDS = 0.92, 0.02, 0.08
_STARTS_BYTES = 4 * 2**20  # by which the least budget differs from start to start, as docs/budget.md says
_SLACK_BYTES, _SLACK = 8 * 2**20, 0.05


@dataclass(frozen=True)
class Verdict:
    """One run: what it was given and took, and what is wrong with it, in words."""

    seed: int
    budget_bytes: int
    figures: dict[str, Any]
    broken: tuple[str, ...]  # promises
    missed: tuple[str, ...]  # goals


def judge(seed: int, budget_bytes: int, plain: dict[str, Any]) -> Verdict:
    """Trains the network of ``seed`` within a budget, and holds it against the ``plain`` run."""
    figures = _run(seed, STEPS, str(budget_bytes))
    if "refused" in figures:
        return Verdict(seed, budget_bytes, figures, ("refused",), ())
    broken, missed = [], []
    if figures["digest"] != plain["digest"]:
        broken.append("other bits than plain torch")
    if figures["highest_peak_bytes"] > budget_bytes:
        broken.append(f"held {format_bytes(figures['highest_peak_bytes'])}")
    used = figures["highest_peak_bytes"] / budget_bytes
    if (figures["swapped_out_bytes"] or figures["recomputed_bytes"]) and used < USED:
        missed.append(f"used {used:.1%}")
    for what, most in (("peak_bytes", PREDICTED_BYTES), ("seconds", PREDICTED_SECONDS)):
        error = figures[f"predicted_{what}"] / figures[f"measured_{what}"] - 1
        if abs(error) > most:
            missed.append(f"{what.removesuffix('_bytes')} predicted {error:+.1%}")
    return Verdict(seed, budget_bytes, figures, tuple(broken), tuple(missed))


def judge_network(seed: int, spacing: float) -> tuple[dict[str, Any], list[Verdict]]:
    """The network of ``seed`` at budgets that lie ``spacing`` of the way from the least to the peak apart."""
    plain, least = _run(seed, STEPS), _run(seed, 1, "least")
    least["least_bytes"] = _named_by_refusal(seed, least["least_bytes"])
    bounds = {"plain_bytes": plain["grown_bytes"], **least}
    print_result(
        f"{seed}: {draw(seed).description}. Plain torch {format_bytes(plain['grown_bytes'])}, least budget "
        f"{format_bytes(least['least_bytes'])}, unplanned {format_bytes(least['unplanned_bytes'])}"
    )
    if least["least_bytes"] > plain["grown_bytes"] + max(_SLACK_BYTES, _SLACK * plain["grown_bytes"]):
        print_result("   the least budget is more than plain torch takes")
    verdicts = []
    room_bytes = max(0, least["unplanned_bytes"] - least["least_bytes"])
    for number in range(round(1 / spacing) + 1 if room_bytes else 1):
        budget_bytes = least["least_bytes"] + _STARTS_BYTES + round(min(1.0, number * spacing) * room_bytes)
        verdicts.append(judge(seed, budget_bytes, plain))
        print_result(f"   {_line(verdicts[-1])}")
    return bounds, verdicts


def _named_by_refusal(seed: int, nbytes: int) -> int:
    """The budget that a refusal of less than about ``nbytes`` says would do, as users find it."""
    figures: dict[str, Any] = {}
    while "refused" not in figures:
        nbytes = nbytes * 9 // 10
        figures = _run(seed, 1, str(nbytes))
    return int(figures["needed_bytes"])


def _line(verdict: Verdict) -> str:
    figures = verdict.figures
    if "refused" in figures:
        return f"{format_bytes(verdict.budget_bytes)}: BROKEN: {figures['refused']}"
    moved = figures["swapped_out_bytes"] + figures["recomputed_bytes"]
    wrong = "; ".join((*(f"BROKEN: {each}" for each in verdict.broken), *verdict.missed)) or "ok"
    return (
        f"{format_bytes(verdict.budget_bytes)}: peak {format_bytes(figures['highest_peak_bytes'])}, "
        f"{format_bytes(moved)} swapped or recomputed: {wrong}"
    )


def _run(seed: int, steps: int, *budget: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.judge.run", str(seed), str(steps), *budget]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Judges the networks and writes what was found; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judge", description=__doc__)
    parser.add_argument("--networks", type=positive, default=12, metavar="N", help="how many are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one (%(default)s)")
    parser.add_argument(
        "--spacing", type=float, default=0.05, metavar="SHARE", help="between budgets, of least to peak (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE", help="(%(default)s)")
    options = parser.parse_args(argv)
    if not 0 < options.spacing <= 1:
        parser.error(f"--spacing must be more than 0 and at most 1, not {options.spacing:g}")
    return run_to_end("judge", lambda: _judge_all(options))


def _judge_all(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    num_broken = num_missed = num_runs = 0
    for seed in range(options.seed, options.seed + options.networks):
        bounds, verdicts = judge_network(seed, options.spacing)
        found.append({"seed": seed, "network": draw(seed).description, **bounds, "runs": [*map(asdict, verdicts)]})
        num_runs += len(verdicts)
        num_broken += sum(bool(verdict.broken) for verdict in verdicts)
        num_missed += sum(bool(verdict.missed) for verdict in verdicts)
        kept = {"machine": asdict(describe_machine()), "steps": STEPS, "spacing": options.spacing, "networks": found}
        write_text(options.output, json.dumps(kept, indent=1) + "\n")
    print_result(f"{num_runs} runs: {num_broken} broke a promise, {num_missed} missed a goal")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
