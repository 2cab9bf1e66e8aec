"""`lmswap diff`: compares the decisions of two plan files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lmswap.ir.bytesize import format_bytes
from lmswap.reporting.decisions import BufferDecision, buffer_decisions
from lmswap.reporting.text import format_seconds, print_result, render_text

if TYPE_CHECKING:
    from lmswap.cli import Commands
    from lmswap.ir.program import Program
    from lmswap.planner.cache import CachedPlan

SAME, DIFFER = 0, 1


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two plan files, buffer by buffer",
        description=f"Exit code {SAME}: they decide the same; {DIFFER}: they do not.",
        epilog="example: lmswap diff before.json after.json",
    )
    parser.add_argument("one", metavar="ONE.json", help="written by lmswap.save_plan")
    parser.add_argument("other", metavar="OTHER.json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the buffers with different decisions, by step."""
    from lmswap.session.plan_file import PinnedPlans

    one, other = PinnedPlans.read(options.one), PinnedPlans.read(options.other)
    code = SAME
    for number, (program, planned) in enumerate(one.steps, start=1):
        alike = other.alike(program)
        if alike is None:
            code = DIFFER
            print_result(_only_in(options.one, number, program))
            continue
        changes = _changes(program, planned, alike[1])
        code = max(code, DIFFER if changes else SAME)
        print_result(_text(number, program, planned, alike[1], changes))
    for number, (program, _) in enumerate(other.steps, start=1):
        if one.alike(program) is None:
            code = DIFFER
            print_result(_only_in(options.other, number, program))
    return code


def _changes(program: Program, one: CachedPlan, other: CachedPlan) -> list[tuple[BufferDecision, BufferDecision]]:
    pairs = zip(buffer_decisions(program, one.plan), buffer_decisions(program, other.plan), strict=True)
    return [(before, after) for before, after in pairs if before.decision is not after.decision]


def _only_in(path: str, number: int, program: Program) -> str:
    return render_text(Text(f"step {number}, of {len(program.ops)} ops, is only in {path}"))


def _text(
    number: int,
    program: Program,
    one: CachedPlan,
    other: CachedPlan,
    changes: list[tuple[BufferDecision, BufferDecision]],
) -> str:
    nbytes = sum(before.nbytes for before, _ in changes)
    rows = Table.grid(padding=(0, 2, 0, 0), expand=True)
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for before, after in changes:
        decisions = f"{before.decision} → {after.decision}"
        rows.add_row(format_bytes(before.nbytes), decisions, Text(before.label))
    seconds = [format_seconds(planned.plan.predicted_seconds) for planned in (one, other)]
    peaks = [format_bytes(planned.plan.predicted_peak_bytes) for planned in (one, other)]
    return render_text(
        Text(
            f"step {number}, of {len(program.ops)} ops: {len(changes)} of {len(program.buffers)} buffers, "
            f"{format_bytes(nbytes)}, have different decisions"
        ),
        Text(f"predicted {' → '.join(seconds)}, peak of its tensors {' → '.join(peaks)}"),
        rows,
    )
