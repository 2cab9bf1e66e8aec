"""The decision for each buffer as a table: how large, where it is made and last used, what happens to it, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.reporting.decisions import BufferDecision, buffer_decisions
from lmswap.reporting.text import format_excess, format_seconds, render_html, render_text

SCHEMA = "lmswap.explanation/1"
MAX_ROWS = 40  # of the printed table: a screen; `to_json` has all of them

_STYLES = {Decision.KEEP: "", Decision.SWAP: "yellow", Decision.RECOMPUTE: "cyan"}


@dataclass(frozen=True)
class Explanation:
    """The decisions for one model, largest buffer first. Prints as a table; iterate ``decisions`` for all of them."""

    model: str
    policy: str
    decisions: tuple[BufferDecision, ...]
    predicted_seconds: float
    excess: float | None  # see `Plan.excess`

    def __post_init__(self) -> None:
        largest_first = sorted(self.decisions, key=lambda decision: (-decision.nbytes, decision.buffer))
        object.__setattr__(self, "decisions", tuple(largest_first))

    def __rich__(self) -> Group:
        """The tables, for `rich.print`; an operator alone is on the line where the buffer is made."""
        heading = f"{self.model}: decisions of policy '{self.policy}', largest buffer first"
        quality = f"step {format_seconds(self.predicted_seconds)}, {format_excess(self.excess)}"
        return Group(Text(heading, style="bold"), Text(quality), Text(), self._rows(), Text(), self._totals())

    def __str__(self) -> str:
        return render_text(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    def __repr__(self) -> str:
        return f"<explanation of {self.model}: {len(self.decisions)} decisions; print it, or see its fields>"

    def to_json(self) -> str:
        """All decisions as JSON text, schema "lmswap.explanation/1"; sizes in bytes."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def _rows(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True)
        table.add_column("size", justify="right", no_wrap=True)
        table.add_column("made", ratio=11, overflow="ellipsis", no_wrap=True)
        table.add_column("last used", ratio=9, overflow="ellipsis", no_wrap=True)
        table.add_column("decision", no_wrap=True)
        table.add_column("why", ratio=9, overflow="fold")
        for row in self.decisions[:MAX_ROWS]:
            is_same_line = bool(row.made_at) and row.made_at == row.last_used_at
            table.add_row(
                format_bytes(row.nbytes),
                Text(_place(row.made_by, row.made_at)),
                Text(_operator(row.last_used_by) if is_same_line else _place(row.last_used_by, row.last_used_at)),
                Text(row.decision, style=_STYLES[row.decision]),
                Text(row.reason),
            )
        rest = self.decisions[MAX_ROWS:]
        if rest:
            table.add_row(format_bytes(_total_bytes(rest)), Text(f"in {len(rest)} smaller buffers, not shown"))
        return table

    def _totals(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("in all")
        table.add_column("buffers", justify="right")
        table.add_column("bytes", justify="right")
        for decision in Decision:
            rows = tuple(row for row in self.decisions if row.decision is decision)
            table.add_row(str(decision), str(len(rows)), format_bytes(_total_bytes(rows)))
        return table


def make_explanation(program: Program, plan: Plan, *, policy: str) -> Explanation:
    """Explains ``plan`` in the terms of ``program``, the step that it was made for; ``policy`` is the one asked for."""
    decisions = buffer_decisions(program, plan)
    return Explanation(program.name, policy, decisions, plan.predicted_seconds, plan.excess)


def _place(target: str, source: str) -> str:
    """Where, by which operator (one line has several), and the code: "unet.py:88 convolution: y = self.conv(x)"."""
    where, _, code = source.partition(" ")
    return f"{where} {_operator(target)}".strip() + (f": {code}" if code else "")


def _operator(target: str) -> str:
    return target.removeprefix("aten.").removesuffix(".default") or "outside the step"


def _total_bytes(rows: tuple[BufferDecision, ...]) -> int:
    return sum(row.nbytes for row in rows)
