"""Results of the parts of the first hour → a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.case_study.findings import headline
from benchmarks.case_study.results import Results
from benchmarks.first_hour import cards, speed
from benchmarks.state import table as state
from benchmarks.weights import table as weights
from lmswap.ir.bytesize import format_bytes


def page(device: str, ended: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown.

    Args:
        device: its name.
        ended: of each part its title, how it ended, after how many seconds, its `summary`, and its origin: driver,
            torch, commit, sizes.
    """
    lines = [
        f"# The first hour on {device}",
        "",
        "| part | ended | s |",
        "|---|---|---|",
        *(f"| {part['title']} | {part['outcome']} | {part['seconds']:.0f} |" for part in ended),
    ]
    for part in ended:
        lines += ["", f"## {part['title']}, on {device}", "", _where(part["origin"]), "", *part["summary"]]
    return "\n".join(lines) + "\n"


def summary(part: str, found: Mapping[str, Any]) -> list[str]:
    """What a part wrote, in lines of Markdown; read by the code that wrote it, as pages are made by that of later."""
    return _SUMMARIES[part](found)


def _where(origin: Mapping[str, Any]) -> str:
    small, large = origin["sizes"]
    return f"{origin['driver']}; torch {origin['torch']}; commit {origin['commit']}; images of {small}³ and {large}³."


def _facts(found: Mapping[str, Any]) -> list[str]:
    calls = ", ".join(f"{name} {microseconds:.1f} µs" for name, microseconds in found["microseconds"].items())
    return [
        f"- {format_bytes(found['used_by_contexts_bytes'])} of {format_bytes(found['total_bytes'])} are contexts'",
        f"- workspaces of both threads: {format_bytes(found['workspaces_bytes'])}",
        f"- {calls}",
        f"- pinned memory: torch has it at {found['pinned_bytes_per_second'] / 1e9:.1f} GB/s, lmswap at "
        f"{found['reserved_bytes_per_second'] / 1e9:.1f} GB/s",
    ]


def _tests(found: Mapping[str, Any]) -> list[str]:
    outcomes = [test["outcome"] for test in found["tests"]]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "skipped", "failed"))
    failed = [test["test"] for test in found["tests"] if test["outcome"] == "failed"]
    return [f"- of {found['collected']} tests {counts}", *(f"- failed: {name}" for name in failed)]


def _repeats(found: Mapping[str, Any]) -> list[str]:
    return [
        f"- cuDNN's {kind}: {sum(of['not_repeated'].values())} of {of['ops']} ops: "
        + (", ".join(f"{count} {target}" for target, count in of["not_repeated"].items()) or "none")
        for kind, of in (("default", found["default"]), ("benchmark", found["benchmark"]))
    ]


def _compared(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for run in found["runs"]:
        how, policy = run["configuration"], run["configuration"]["policy"]
        kind = {None: "plain torch", "none": "unplanned"}.get(policy, "lmswap")
        sizes = (format_bytes(run["peak_bytes"]), format_bytes(run["tensor_peak_bytes"] or 0))
        rows.append(f"| {how['size']}³, {kind} | {sizes[0]} | {sizes[1]} | {run['step_seconds'][-1]:.3f} |")
    failures = [f"- failed: {failure['message'][:300]}" for failure in found["failures"]]
    return ["| run | reserved | tensors | last step, s |", "|---|---|---|---|", *rows, "", *failures]


def _case_study(found: Mapping[str, Any]) -> list[str]:
    results = Results.from_fields(found)
    failures = [f"- failed: {failure.configuration.name}: {failure.message[:300]}" for failure in results.failures]
    return [f"- {headline(results)}", *failures]


def _stalls(found: Mapping[str, Any]) -> list[str]:
    columns = ("way", "kernels, ms", "idle", "of it beside copies", "copying", "slowed by copies", "in / out, GB/s")
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in (run for runs in found["networks"].values() for run in runs if "busy_seconds" in run.get("kernels", {})):
        kernels = run["kernels"]
        names = ("busy_seconds", "idle_seconds", "idle_copying_seconds", "copying_seconds", "slowed_seconds")
        cells = [run["way"], *(f"{1e3 * kernels[name]:.2f}" for name in names)]
        cells.append(" / ".join(f"{copies['bytes_per_second'] / 1e9:.1f}" for copies in kernels["copies"].values()))
        table.append(f"| {' | '.join(cells)} |")
    return [*speed.lines(found), "", *table]


def _mapped(found: Mapping[str, Any]) -> list[str]:
    table = ["| kernel on pinned host memory | bits | GB/s | over device memory |", "|---" * 4 + "|"]
    for row in found.get("kernels", ()):
        if "failure" in row:
            table.append(f"| {row['operation']} | {row['failure']} | | |")
            continue
        over = row["mapped_seconds"] / row["device_seconds"]
        bits = "same" if row["same"] else "others"
        table.append(f"| {row['operation']} | {bits} | {row['bytes_per_second'] / 1e9:.1f} | {over:.2f} × |")
    return table


_SUMMARIES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "facts": _facts,
    "tests": _tests,
    "speed": speed.lines,
    "cards": cards.lines,
    "repeats": _repeats,
    "compared": _compared,
    "case-study": _case_study,
    "headline": speed.lines,
    "stalls": _stalls,
    "peers": speed.lines,
    "links": _stalls,
    "mapped": _mapped,
    "weights": lambda found: weights.lines(found["tasks"]),
    "state": lambda found: state.lines(found["tasks"]),
    "whole-state": lambda found: state.lines(found["tasks"]),
}
