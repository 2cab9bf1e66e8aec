"""The result of profiling: figures of traces, as a table, as JSON and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmswap.errors import WindowError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.timeline import Lane
from lmswap.profiling.figures import CopyFigures, Figures, figures_of
from lmswap.profiling.trace import Stall, Trace
from lmswap.reporting.chrome import write_chrome_trace
from lmswap.reporting.text import Printable, figure_table, format_seconds

SCHEMA = "lmswap.profile/1"
_MAX_COLUMNS = 3  # of a table
_MAX_STALLS = 10  # printed; the JSON has all


@dataclass
class Profile(Printable):
    """Figures of the profiled steps, a column per tool and device; prints as a table.

    ``title``: what was profiled; ``notes``: what was used in place of the requested tool. ``traces`` is empty while the
    steps are still running: then everything else raises.
    """

    title: str
    traces: tuple[Trace, ...] = ()
    notes: list[str] = field(default_factory=list)

    @cached_property
    def figures(self) -> tuple[Figures, ...]:
        """The figures of each trace.

        Raises:
            WindowError: the profiled steps are not over.
            TraceError: a trace has no duration.
        """
        return tuple(figures_of(trace.timeline) for trace in self._recorded())

    def _recorded(self) -> tuple[Trace, ...]:
        if not self.traces:
            raise WindowError("there are no figures yet: the profiled steps are not over")
        return self.traces

    @property
    def is_valid(self) -> bool:
        """Whether the figures measure swapping: no copy went through pageable memory."""
        return not any(figures.invalid for figures in self.figures)

    def to_json(self) -> str:
        """Return all figures and stalls as JSON, schema "lmswap.profile/1"; bytes and seconds, rates in bytes/s."""
        devices = [
            {
                "tool": trace.tool,
                "device": trace.device,
                "is_valid": not figures.invalid,
                "emulated_link": trace.emulated_link,
                "figures": asdict(figures),
                "stalls": [asdict(stall) for stall in trace.stalls],
                "notes": trace.notes,
            }
            for trace, figures in zip(self.traces, self.figures, strict=True)
        ]
        return json.dumps({"schema": SCHEMA, "title": self.title, "notes": self.notes, "devices": devices}, indent=1)

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write every trace as a process of one trace file, which Perfetto and chrome://tracing open.

        Raises:
            OptionError: a folder that does not exist.
            WindowError: the profiled steps are not over.
        """
        write_chrome_trace(Path(path), [trace.timeline for trace in self._recorded()], about={"profiled": self.title})

    def __rich__(self) -> Group:
        """Return the profile's parts, for `rich.print`."""
        columns = list(zip(self.traces, self.figures, strict=True))
        parts: list[RenderableType] = [Text(f"lmswap profile: {self.title}", style="bold"), Text()]
        for link in dict.fromkeys(trace.emulated_link for trace in self.traces if trace.emulated_link):
            parts += [Text(f"Link EMULATED: {link}.", style="bold"), Text()]
        for trace, figures in columns:
            if figures.invalid:
                parts += [Text(f"NOT A VALID MEASUREMENT ({trace.tool}): {figures.invalid}.", style="bold red"), Text()]
        for start in range(0, len(columns), _MAX_COLUMNS):
            parts += [_table(columns[start : start + _MAX_COLUMNS]), Text()]
        for trace in self.traces:
            if trace.stalls:
                parts += [_stall_table(trace), Text()]
        parts += [Text(f"Note: {note}.") for note in self.notes]
        if not any(figures.copies_in.num_copies or figures.copies_out.num_copies for figures in self.figures):
            parts.append(Text("Nothing of 1 MiB or more was copied: lmswap.report(model) says why nothing is swapped."))
        parts += [Text(f"{trace.tool}: {note}.") for trace in self.traces for note in trace.notes]
        return Group(*parts)

    def __repr__(self) -> str:
        return f"<profile of {self.title}; print it, or see its fields>"


def _table(columns: list[tuple[Trace, Figures]]) -> Table:
    table = figure_table("", *(f"{trace.tool}\n{trace.device}" for trace, _ in columns), gap=3)
    rows: list[tuple[str, Callable[[Figures], str]]] = [
        ("steps", lambda f: str(f.num_steps)),
        ("step, median", lambda f: format_seconds(f.step_seconds)),
        ("utilization", lambda f: _percent(f.utilization)),
        *_copy_rows("in", lambda f: f.copies_in),
        *_copy_rows("out", lambda f: f.copies_out),
        ("copying exposed, a step", lambda f: format_seconds(f.exposed_seconds / f.num_steps)),
        ("copying hidden by compute", lambda f: _percent(f.overlap)),
        *(_COLLECTIVE_ROWS if any(figures.collective_seconds for _, figures in columns) else ()),
        ("waited for copies, a step", lambda f: format_seconds(f.stall_seconds / f.num_steps)),
        ("idle, a step", lambda f: format_seconds(f.idle_seconds / f.num_steps)),
        ("gap between steps, mean", lambda f: _mean_seconds(f.gap_seconds)),
    ]
    for name, cell in rows:
        table.add_row(name, *(cell(figures) for _, figures in columns))
    return table


_COLLECTIVE_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("collectives, a step", lambda f: format_seconds(f.collective_seconds / f.num_steps)),
    ("collectives hidden by compute", lambda f: _percent(f.collective_overlap)),
)


def _copy_rows(way: str, copies: Callable[[Figures], CopyFigures]) -> list[tuple[str, Callable[[Figures], str]]]:
    return [
        (f"copied {way}, a step", lambda f: format_bytes(round(copies(f).bytes_per_step))),
        ("  while copying", lambda f: _rate(copies(f).bytes_per_second)),
        ("  while any copy runs", lambda f: _rate(copies(f).busy_bytes_per_second)),
        ("  over all steps", lambda f: _rate(copies(f).window_bytes_per_second)),
        ("  copies below 1 MiB", lambda f: f"{copies(f).num_small}, {format_bytes(copies(f).small_bytes)}"),
    ]


def _stall_table(trace: Trace) -> Table:
    longest: tuple[Stall, ...] = trace.stalls[:_MAX_STALLS]
    title = f"Longest waits for copies ({trace.tool}, {len(longest)} of {len(trace.stalls)})"
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title=title, title_justify="left")
    table.add_column("waited", justify="right", no_wrap=True, min_width=7)
    table.add_column("times", justify="right", no_wrap=True, min_width=5)
    table.add_column("op, what it waited for, and its line", overflow="fold")
    for stall in longest:
        what = f"for {stall.buffer} to {'arrive' if stall.lane is Lane.IN else 'leave'}"
        where = "\n".join(filter(None, (stall.op, what, stall.source)))
        table.add_row(format_seconds(stall.seconds), str(stall.num), Text(where))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _rate(bytes_per_second: float | None) -> str:
    return "–" if bytes_per_second is None else f"{bytes_per_second / 1e9:.2f} GB/s"


def _mean_seconds(seconds: tuple[float, ...]) -> str:
    return format_seconds(sum(seconds) / len(seconds)) if seconds else "–"
