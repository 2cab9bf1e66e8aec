"""Runs a script under a profiler: ``python train.py …`` → the same command, with its steps counted → its Profile.

The script runs unchanged in `lmswap.profiling.run`, which counts its steps and starts the profiler for the window. nsys
and nvprof run around that; Kineto and lmswap's own record run in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

from lmswap.errors import OptionError, WindowError
from lmswap.profiling.profile import Profile
from lmswap.profiling.readers import read_traces
from lmswap.profiling.trace import Trace, side_by_side
from lmswap.profiling.window import Window

REQUEST, OUTCOME, OWN = "request.json", "outcome.json", "lmswap.json"
TOOL_FILES = {"kineto": "kineto.json", "nsys": "nsys.sqlite", "nvprof": "nvprof.sqlite"}
_PYTHON = re.compile(r"python[0-9.]*")
_SPANS_EPOCHS = (
    "an epoch ended before the last of these steps: what ran between the two epochs, such as validation, counts to the "
    "first step of the second"
)
# Python's own options that take a value in the next argument.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


class ScriptFailed(WindowError):
    """The profiled script failed; ``exit_code`` is its own, as in a shell."""

    def __init__(self, returncode: int) -> None:
        self.exit_code = returncode if returncode >= 0 else 128 - returncode
        how = f"with exit code {returncode}" if returncode >= 0 else f"by signal {-returncode}"
        super().__init__(f"the profiled script ended {how}: nothing is reported")


def profile_command(command: Sequence[str], window: Window, *, tool: str, folder: Path, stop: bool) -> Profile:
    """Run ``command``, which starts with a Python interpreter, and profile ``window`` of it.

    Args:
        command: ``python train.py …`` or ``python -m package …``.
        window: the steps.
        tool: "kineto", "nsys", "nvprof" or "lmswap", and one that works here: see `lmswap.profiling.tools`.
        folder: for the tools' files.
        stop: end the script after the window.

    Raises:
        OptionError: the command cannot be profiled.
        ScriptFailed: the script ended with an error of its own.
        WindowError: the script ended before the window did.
        TraceError: what the tool wrote cannot be used.
    """
    watched = _under_run(command, folder)
    for name in (OUTCOME, OWN, *TOOL_FILES.values()):
        (folder / name).unlink(missing_ok=True)  # of an earlier run
    request = {"tool": tool, "window": asdict(window), "folder": str(folder), "stop": stop}
    (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
    returncode = subprocess.run(profiler_command(tool, watched, folder), check=False).returncode
    outcome = _outcome(folder)
    if outcome.get("error") and (stop or returncode == 0):
        raise WindowError(str(outcome["error"]))
    if returncode != 0:
        raise ScriptFailed(returncode)
    if outcome.get("first") is None:
        raise window.error_for(outcome.get("epochs", []))
    first, num_steps = int(outcome["first"]), window.stop - window.first
    traces = _traces(tool, folder, first, num_steps)
    began = accumulate(outcome["epochs"])  # the later epochs, with these steps
    notes = [_SPANS_EPOCHS] if any(first <= step < first + num_steps for step in began) else []
    return Profile(f"{window} of {' '.join(command)}", traces, notes)


def profiler_command(tool: str, command: Sequence[str], folder: Path) -> list[str]:
    """Return ``command`` under ``tool``, recording only between cudaProfilerStart and Stop, into ``folder``."""
    if tool == "nsys":
        options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
        options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--export=sqlite"]
        return ["nsys", "profile", *options, "--force-overwrite=true", f"--output={folder / 'nsys'}", *command]
    if tool == "nvprof":
        output = str(folder / TOOL_FILES["nvprof"])
        return ["nvprof", "--profile-from-start", "off", "--force-overwrite", "--export-profile", output, *command]
    return list(command)


def _under_run(command: Sequence[str], folder: Path) -> list[str]:
    """Return ``command`` with `lmswap.profiling.run` between Python's own options and the script."""
    if not command or not _PYTHON.fullmatch(PurePath(command[0]).name):
        raise OptionError(
            "what is profiled must start with a Python interpreter: lmswap profile -- python train.py ..."
            + (f" (not '{command[0]}')" if command else "")
        )
    script = 1
    while script < len(command) and command[script].startswith("-") and command[script] not in ("-m", "-c", "-"):
        script += 2 if command[script] in _WITH_VALUE else 1
    if script >= len(command) or command[script] in ("-c", "-"):
        raise OptionError("what is profiled must be a script or a module: python train.py ..., python -m package ...")
    if command[script] != "-m" and not Path(command[script]).exists():
        raise OptionError(f"there is no script '{command[script]}' in '{Path.cwd()}'")
    interpreter = sys.executable if command[0] in ("python", "python3") else command[0]
    run = ["-m", "lmswap.profiling.run", str(folder / REQUEST)]
    return [interpreter, *command[1:script], *run, *command[script:]]


def _outcome(folder: Path) -> dict[str, Any]:
    """Return what the profiled process wrote at its end; empty if it did not get there."""
    try:
        outcome: dict[str, Any] = json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return outcome


def _traces(tool: str, folder: Path, first: int, num_steps: int) -> tuple[Trace, ...]:
    own = read_traces(folder / OWN) if (folder / OWN).exists() else ()
    if tool == "lmswap":
        return own
    seen = read_traces(folder / TOOL_FILES[tool])
    return side_by_side([trace.steps_between(first, first + num_steps) for trace in seen], own)
