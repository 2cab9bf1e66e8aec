"""Text out of files on its way to a terminal: no control character of it arrives, whichever command prints it."""

import io
import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.console import make_console
from benchmarks.distributed import __main__ as distributed
from benchmarks.distributed.prediction.network import PRESETS
from lmswap.analyze.cost import roofline
from lmswap.cli import entry
from lmswap.errors import OptionError, PlanMismatch
from lmswap.ir.machine import Link, Machine, Rate, Tier
from lmswap.options import Options
from lmswap.planner import make_plan
from lmswap.planner.cache import CachedPlan, PlannedMemory
from lmswap.reporting.text import print_result, render_text
from lmswap.session.diagnostics import warn
from lmswap.session.plan_file import PinnedPlans
from lmswap.terminal import escape_controls
from tests.profiling.files import kineto_data, nvprof_csv_text
from tests.reporting.small_step import MIB, PROGRAM, report

# The terminal's title, its clipboard, a cleared screen (by CSI in one byte, too), and text that reads backwards.
EVIL = "\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x9b2J\u202e\r"
LINK = Link(Rate.constant(2**30), Rate.constant(2**29))
MACHINE = Machine("unit", 2**30, 1e9, 1e9, 1e-6, (Tier("host", 2**30, LINK),))


def is_clean(text):
    return all(line.isprintable() for line in text.split("\n"))


def poisoned(data, key, at=""):
    """JSON in which every string below ``key`` is evil; `keys_of` are those that there are."""
    if isinstance(data, dict):
        return {name: poisoned(value, key, f"{at}.{name}") for name, value in data.items()}
    if isinstance(data, list):
        return [poisoned(value, key, at) for value in data]
    return data + EVIL if isinstance(data, str) and at == key else data


def keys_of(data, at=""):
    """Where in JSON there are strings: the names that lead there."""
    if isinstance(data, dict):
        return {key for name, value in data.items() for key in keys_of(value, f"{at}.{name}")}
    if isinstance(data, list):
        return {key for value in data for key in keys_of(value, at)}
    return {at} if isinstance(data, str) else set()


def pinned(policy="swap_all"):
    costs = roofline(PROGRAM, MACHINE)
    plan = make_plan(policy, PROGRAM, costs, MACHINE, budget_bytes=8 * MIB, tier="host", min_swap_bytes=1)
    options = Options.parse(8 * MIB, policy=policy, tier="host", min_swap_bytes=1)
    return PinnedPlans(
        "Small", options, ((PROGRAM, CachedPlan(plan, costs, MACHINE, PlannedMemory(8 * MIB))),)
    ).to_json()


@given(st.text(st.characters()))
@example("\\")
def test_escaped_text_is_printable_and_unambiguous(text):
    escaped = escape_controls(text)
    assert is_clean(escaped)
    assert escape_controls(escaped) == escaped
    if "\\" not in text:
        assert escaped.encode("ascii", "backslashreplace").decode("unicode_escape") == text
    assert (escaped == text) == is_clean(text)


@pytest.mark.parametrize("which", ["program", "machine", "network", "plan", "trace"])
def test_no_command_prints_a_control_character_out_of_a_file(tmp_path, capsys, which):
    texts = {
        "program": PROGRAM.to_json(),
        "machine": MACHINE.to_json(),
        "network": PRESETS["ac922"].to_json(),
        "plan": pinned(),
        "other plan": pinned("swap"),
        "trace": json.dumps(kineto_data()),
    }
    files = {name: tmp_path / f"{name}.json" for name in texts}
    for name, text in texts.items():
        files[name].write_text(text)
    planned = ["plan", files["program"], "--machine", files["machine"], "--budget", "90%", "--min-swap", "1"]
    commands = {
        "program": [planned],
        "machine": [planned],
        "network": [["predict", *planned[1:], "--ranks", "2", "--network", files["network"]]],
        "plan": [["diff", files["plan"], files["other plan"]], ["diff", files["other plan"], files["plan"]]],
        "trace": [["profile", "--read", files["trace"]]],
    }
    data, shown = json.loads(texts[which]), set()
    for key in sorted(keys_of(data)):
        files[which].write_text(json.dumps(poisoned(data, key)))
        for command in commands[which]:
            main = distributed.main if command[0] == "predict" else entry.main
            main(list(map(str, command)))
            done = capsys.readouterr()
            assert is_clean(done.out) and is_clean(done.err), key
            shown |= {key} if "owned" in done.out + done.err else set()
    assert len(shown) >= {"program": 5, "machine": 1, "network": 0, "plan": 5, "trace": 0}[which], shown


def test_foreign_tables_are_printed_without_control_characters(tmp_path, capsys):
    text = nvprof_csv_text()
    file = tmp_path / f"table{EVIL[:9]}.csv"
    file.write_text(text.replace("conv3d", f"conv3d{EVIL[:6]}"))
    entry.main(["profile", "--read", str(file)])
    done = capsys.readouterr()
    assert is_clean(done.out) and is_clean(done.err) and "owned" in done.out + done.err


def test_errors_that_quote_files_have_no_control_characters():
    assert str(OptionError(f"it has {EVIL}")) == (r"it has \x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x9b2J\u202e\r")
    plans = PinnedPlans.from_json(pinned())
    evil = PinnedPlans(EVIL, plans.options, plans.steps)
    with pytest.raises(PlanMismatch) as raised:
        evil.check_device(replace(MACHINE, name="another"))
    assert "owned" in str(raised.value) and is_clean(str(raised.value))


def test_reprs_of_programs_and_reports_have_no_control_characters():
    assert is_clean(str(replace(PROGRAM, name=EVIL)))
    assert is_clean(str(report(model=EVIL, notes=[EVIL])))
    assert is_clean(render_text(EVIL))


def test_warnings_and_records_have_none(caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(EVIL, UserWarning)
    assert is_clean(str(caught[0].message))
    script = (
        f"import logging; from lmswap.log_output import set_up_logging; set_up_logging({{'LMSWAP_LOG_LEVEL': 'INFO'}});"
        f"logging.getLogger('lmswap').info('%s', {EVIL!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "owned" in done.stderr and is_clean(done.stderr)


@pytest.mark.parametrize("colours", [False, True])
def test_a_benchmarks_console_keeps_its_own_colours_only(monkeypatch, colours):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    if colours:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    console.print(f"[b]subject[/] {EVIL}", highlight=False)
    printed = console.file.getvalue()
    assert printed.startswith("\x1b[1msubject\x1b[0m" if colours else "subject") and "owned" in printed
    assert is_clean(printed.removeprefix("\x1b[1msubject\x1b[0m"))


def test_commands_print_their_own_line_breaks(capsys):
    print_result("one\ntwo\x1b[2J")
    assert capsys.readouterr().out == "one\ntwo\\x1b[2J\n"
