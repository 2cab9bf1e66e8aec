"""Plans stored steps for described machines, and says what got better or worse: `python -m benchmarks.programs`.

Exit code 1 when a plan is worse than the stored one, or fits no more, or when another policy's beats that of `auto`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baselines import BASELINES
from benchmarks.programs.compare import Change, Verdict, change, faster_than_auto, read_outcomes, write_outcomes
from benchmarks.programs.corpus import machine_names, program_names
from benchmarks.programs.replay import Outcome, replay
from benchmarks.unet3d.ending import run_to_end
from lmswap.hardware.device import describe_device
from lmswap.planner import POLICIES
from lmswap.reporting.text import format_seconds

STORED = Path(__file__).parents[1] / "results" / "programs.json"
# 42 %: what the U-Net at 144³ needs, of what it needs at 192³.
BUDGET_PERCENTS = (90, 70, 50, 42, 40, 30, 20)
QUICK = {
    "programs": ["unet3d_192", "unet3d_192_bf16", "vit"],
    "machines": ["v100_gen3", "h200_gen5", "h200_gen5_bf16"],
    "budgets": [50, 30],
}
_STYLES = {
    Verdict.NEW: "dim",
    Verdict.SAME: "dim",
    Verdict.BETTER: "green",
    Verdict.WORSE: "bold red",
    Verdict.SLOWER_PLANNING: "yellow",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Replays what the arguments choose; 2 for what cannot be used, 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    return run_to_end("programs", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 180)
    stored = read_outcomes(options.results)
    rows = []
    with console.status("planning …") as status:
        for outcome in replay(options.programs, options.machines, options.budgets, options.policies):
            status.update(f"planned {outcome.case}")
            rows.append((outcome, change(stored.get(outcome.case), outcome)))
    console.print(make_table(rows))
    outcomes = {**stored, **{outcome.case: outcome for outcome, _ in rows}}
    if options.store:
        write_outcomes(options.results, outcomes, _origin())
    counts = {verdict: sum(found.verdict is verdict for _, found in rows) for verdict in Verdict}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    beaten = faster_than_auto(outcomes)
    for case in beaten:
        console.print(f"[bold red]faster than policy auto:[/] {case}")
    return 1 if beaten or (counts[Verdict.WORSE] and not options.store) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=program_names(), default=program_names(), metavar="NAME")
    parser.add_argument("--machines", nargs="+", choices=machine_names(), default=machine_names(), metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGET_PERCENTS, metavar="PERCENT")
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, *BASELINES), default=["auto"], metavar="POLICY")
    parser.add_argument("--quick", action="store_true", help="a subset that takes less than half a minute")
    parser.add_argument("--results", type=Path, default=STORED, help="what to compare with")
    parser.add_argument("--store", action="store_true", help="let the results be what later runs are compared with")
    return parser


def make_table(rows: Sequence[tuple[Outcome, Change]]) -> Table:
    """One row for each outcome; seconds of the step as a multiple of the step with unlimited memory."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("program", "machine"):
        table.add_column(heading, no_wrap=True)
    for heading in ("budget", "step", "× free", "bound", "gap", "peak GiB", "swapped", "again", "planned in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("policy", "against stored"):
        table.add_column(heading, no_wrap=True)
    for outcome, found in rows:
        verdict = f"[{_STYLES[found.verdict]}]{found.verdict} {found.text}[/]"
        table.add_row(outcome.case.program, outcome.case.machine, *_figures(outcome), verdict)
    return table


def _figures(outcome: Outcome) -> tuple[str, ...]:
    plan, planned = outcome.plan, format_seconds(outcome.planning_seconds)
    budget = f"{outcome.case.budget_percent} %"
    if plan is None:
        return (budget, "none", *[""] * 6, planned, outcome.case.policy)
    return (
        budget,
        format_seconds(plan.step_seconds),
        f"{plan.step_seconds / outcome.free_seconds:.3f}",
        f"{plan.bound_seconds / outcome.free_seconds:.3f}",
        f"{round(plan.step_seconds / plan.bound_seconds - 1, 9) + 0.0:.1%}",  # not -0.0%, for sums differ in a last bit
        f"{plan.peak_bytes / 2**30:.2f}",
        f"{plan.swapped_bytes / 2**30:.2f}",
        f"{plan.recomputed_bytes / 2**30:.2f}",
        planned,
        plan.policy,
    )


def _origin() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], check=True, capture_output=True, text=True, cwd=STORED.parent
    )
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "planned_on": str(describe_device(torch.device("cpu"))),
    }


if __name__ == "__main__":
    sys.exit(main())
