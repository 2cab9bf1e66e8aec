"""The explanation of a plan: a table of the buffers, with size, producer, last use, decision and reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmswap.ir.bytesize import format_bytes
from lmswap.ir.json_io import fields_of
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.reporting.decisions import BufferDecision, buffer_decisions
from lmswap.reporting.text import Printable, figure_table, format_excess, format_longer, format_seconds

SCHEMA = "lmswap.explanation/1"
MAX_ROWS = 10  # of the printed table by default; `to_json` has all of them
_PRINTS_THEM = "all_buffers=True or --all-buffers prints them"

_STYLES = {Decision.KEEP: "", Decision.SWAP: "yellow", Decision.RECOMPUTE: "cyan"}


@dataclass(frozen=True, repr=False)
class Explanation(Printable):
    """The decisions for one model, largest buffer first. Prints as a table of the ten largest, or of all.

    Iterate ``decisions`` for all of them.
    """

    model: str
    policy: str
    decisions: tuple[BufferDecision, ...]
    predicted_seconds: float
    excess: float | None  # see `Plan.excess`
    free_seconds: float | None = None  # of the same step in unlimited memory
    plan_notes: tuple[str, ...] = ()  # on its plans and replanning
    all_buffers: bool = False  # print all of them

    def __post_init__(self) -> None:
        largest_first = sorted(self.decisions, key=lambda decision: (-decision.nbytes, decision.buffer))
        object.__setattr__(self, "decisions", tuple(largest_first))

    def __rich__(self) -> Group:
        """Return the tables, for `rich.print`."""
        heading = Text(f"{self.model}: decisions of policy '{self.policy}'", style="bold")
        longer = format_longer(self.predicted_seconds, self.free_seconds)
        parts = [f"step {format_seconds(self.predicted_seconds)}", longer and f"{longer} over unlimited memory"]
        quality = Text(", ".join([*filter(None, parts), format_excess(self.excess)]))
        return Group(heading, quality, *map(Text, self.plan_notes), Text(), self.tables())

    def tables(self) -> Group:
        """Return bytes by decision, and the largest buffers, or all of them; a sentence if all are kept."""
        if not self.all_buffers and all(row.decision is Decision.KEEP for row in self.decisions):
            kept = f"All {len(self.decisions)} buffers, {format_bytes(_total_bytes(self.decisions))} together, are kept"
            return Group(Text(f"{kept}; {_PRINTS_THEM}."))
        shown = self.decisions if self.all_buffers else self.decisions[:MAX_ROWS]
        rest = self.decisions[len(shown) :]
        parts: list[RenderableType] = [self._totals(), Text(), _rows(shown)]
        if rest:
            others = f"{len(rest)} more buffers, {format_bytes(_total_bytes(rest))} together, are not shown"
            parts += [Text(), Text(f"{others}; {_PRINTS_THEM}.")]
        return Group(*parts)

    def __repr__(self) -> str:
        return f"<explanation of {self.model}: {len(self.decisions)} decisions; print it, or see its fields>"

    def to_json(self) -> str:
        """Return all decisions as JSON, schema "lmswap.explanation/1"; sizes in bytes."""
        record = fields_of(self)
        del record["all_buffers"]
        return json.dumps({"schema": SCHEMA, **record}, indent=1, default=fields_of)

    def _totals(self) -> Table:
        table = figure_table("in all", "buffers", "bytes")
        for decision in Decision:
            rows = tuple(row for row in self.decisions if row.decision is decision)
            table.add_row(str(decision), str(len(rows)), format_bytes(_total_bytes(rows)))
        return table


def make_explanation(
    program: Program,
    plan: Plan,
    *,
    policy: str,
    free_seconds: float | None = None,
    plan_notes: Sequence[str] = (),
    all_buffers: bool = False,
) -> Explanation:
    """Explain ``plan`` in terms of ``program``, the step that it was made for; ``policy`` is the requested one."""
    return Explanation(
        program.name,
        policy,
        buffer_decisions(program, plan),
        plan.predicted_seconds,
        plan.excess,
        free_seconds,
        tuple(plan_notes),
        all_buffers,
    )


def _rows(decisions: tuple[BufferDecision, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("buffer, and why", ratio=1)
    for row in decisions:
        made = Text(row.label, no_wrap=True, overflow="ellipsis")
        why = Text("; ".join(filter(None, (row.reason, _last_use(row)))))
        table.add_row(format_bytes(row.nbytes), Text(row.decision, style=_STYLES[row.decision]), Group(made, why))
    return table


def _last_use(row: BufferDecision) -> str:
    if not row.last_used_by:
        return ""
    where, _, _ = row.last_used_at.partition(" ")
    operator = row.last_used_by.removeprefix("aten.").removesuffix(".default")
    is_other_line = bool(where) and row.last_used_at != row.made_at
    return f"last used by {operator}" + f" ({where})" * is_other_line


def _total_bytes(rows: tuple[BufferDecision, ...]) -> int:
    return sum(row.nbytes for row in rows)
