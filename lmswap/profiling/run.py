"""Runs a script as Python would, counts its steps and profiles those of the window.

``python -m lmswap.profiling.run REQUEST.json train.py …`` (or ``-m package …``); started by `lmswap.profiling.launch`,
which reads the results from the request's folder. torch is imported before the script: environment variables that torch
reads at import must be set outside.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmswap.errors import LmswapError
from lmswap.profiling.launch import OUTCOME, OWN, TOOL_FILES
from lmswap.profiling.readers.own import write_traces
from lmswap.profiling.recording import CaptureRangeRecorder, KinetoRecorder, Recording, StepRecorder
from lmswap.profiling.window import StepCounter, Window

if TYPE_CHECKING:
    from lmswap.profiling.collect import EngineRecorder


class WindowProfiler:
    """Records the window of a script, and does not affect the script: failures here are only written down.

    ``first`` is the number of the window's first step among all steps, None until the window is over. With ``stop`` the
    script ends when the window is over, or can no longer be recorded.
    """

    def __init__(self, tool: str, window: Window, folder: Path, *, stop: bool) -> None:
        self._tool, self._window, self._folder, self._stop = tool, window, folder, stop
        self._recording: Recording | None = None
        self._own: EngineRecorder | None = None
        self.first: int | None = None
        self.error = ""
        self._counter = StepCounter(self._step_ended, self._optimizer_ran, window.steps_per_epoch)

    def close(self) -> None:
        """Write the outcome to the folder."""
        self._counter.close()
        self._discard()
        self._write_outcome()

    def _write_outcome(self) -> None:
        outcome = {"first": self.first, "epochs": self._counter.epochs, "error": self.error}
        (self._folder / OUTCOME).write_text(json.dumps(outcome), encoding="utf-8")

    def _optimizer_ran(self, name: str, began: float, ended: float) -> None:
        if self._recording is not None and self._own is not None:
            self._own.optimizer_ran(name, began, ended)

    def _step_ended(self, epoch: int, step: int, number: int) -> None:
        if self.first is not None or self.error:
            return
        try:
            self._advance(epoch, step, number)
        except Exception as error:  # the script continues, whatever fails
            self.error = str(error) if isinstance(error, LmswapError) else f"{type(error).__name__}: {error}"
            self._discard()
            with suppress(OSError):  # it is written again at the end
                self._write_outcome()
        if self._stop and (self.error or self.first is not None):
            raise SystemExit(2 if self.error else 0)

    def _discard(self) -> None:
        """End a recording that will not be used."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):
                recording.stop()

    def _advance(self, epoch: int, step: int, number: int) -> None:
        window = self._window
        if window.is_past(epoch):
            raise window.error_for(self._counter.epochs)
        index = window.index(epoch, step, number)
        if self._recording is not None:
            assert index is not None
            self._recording.step_ended(is_last=index + 1 == window.stop)
            if index + 1 == window.stop:
                self._finish(number)
        elif index is not None and index + 1 == window.first:
            self._recording = Recording(self._recorders(), number + 1)

    def _recorders(self) -> list[StepRecorder]:
        recorders: list[StepRecorder] = []
        # Only a script that has enabled a model has imported this; importing it takes seconds.
        api = sys.modules.get("lmswap.api")
        if self._tool == "lmswap" or (api is not None and api.sessions()):
            from lmswap.profiling.collect import EngineRecorder

            self._own = EngineRecorder()
            recorders.append(self._own)
        if self._tool == "kineto":
            recorders.append(KinetoRecorder(self._folder / TOOL_FILES["kineto"]))
        elif self._tool != "lmswap":
            recorders.append(CaptureRangeRecorder())
        return recorders

    def _finish(self, number: int) -> None:
        assert self._recording is not None
        if self._own is not None:
            write_traces(self._folder / OWN, self._own.traces(self._recording.steps))
        self.first = number + 1 - len(self._recording.steps)
        self._recording = None
        self._write_outcome()  # now: a script may end without `close`


def main(arguments: Sequence[str]) -> None:
    """Run the script that follows the request."""
    request: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    watch = WindowProfiler(
        request["tool"], Window(**request["window"]), Path(request["folder"]), stop=bool(request["stop"])
    )
    try:
        run_script(arguments[1:])
    finally:
        watch.close()


def run_script(command: Sequence[str]) -> None:
    """Run ``train.py …`` or ``-m package …`` in this process as Python would."""
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
