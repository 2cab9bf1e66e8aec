"""Recorders for the window: Kineto, or CUDA's capture range for nsys and nvprof, or none.

The device is synchronized at both ends of the window and after each step in it, so that work belongs to the step that
queued it; a script that reads its loss every step does the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lmswap.errors import OptionError
from lmswap.ir.timeline import Step
from lmswap.torch_compat.autograd import is_profiling


class StepRecorder(Protocol):
    """Records steps, in the process that runs them."""

    def start(self, number: int) -> None:
        """Start with step ``number``."""

    def step_ended(self, number: int) -> None:
        """Note that the step has ended and step ``number`` begins."""

    def stop(self) -> None:
        """Stop; the step under way is the last."""


class Recording:
    """Runs recorders over consecutive steps, and keeps the steps' times, in seconds of `time.perf_counter`."""

    def __init__(self, recorders: Sequence[StepRecorder], number: int) -> None:
        """Start with step ``number``."""
        self._recorders, self._number = recorders, number
        self.steps: list[Step] = []
        _synchronize()
        for recorder in recorders:
            recorder.start(number)
        self._began = time.perf_counter()

    def step_ended(self, *, is_last: bool = False) -> None:
        """End a step; the next one begins, or the recording ends with it."""
        _synchronize()
        now = time.perf_counter()
        self.steps.append(Step(self._number, self._began, now))
        if is_last:
            self.stop()
            return
        self._number, self._began = self._number + 1, now
        for recorder in self._recorders:
            recorder.step_ended(self._number)

    def stop(self) -> None:
        """End the recording; what follows the last ended step belongs to none."""
        with ExitStack() as stopping:  # each, even if another fails
            for recorder in reversed(self._recorders):
                stopping.callback(recorder.stop)


class KinetoRecorder:
    """torch.profiler over the window, written to ``path`` in Kineto's trace format; each step is a range.

    Raises:
        OptionError: a torch.profiler is running already; a second one would end it.
    """

    def __init__(self, path: Path) -> None:
        if is_profiling():
            raise OptionError("the script runs torch.profiler itself, and there can be only one: use another tool")
        self._path = path
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Without `acc_events` torch 2.11 warns that it drops events of earlier cycles; here there is one.
        new_profile = partial(torch.profiler.profile, activities=activities, acc_events=True)
        # The first profile of a process initializes CUPTI, which takes long: not within the one that is kept.
        with new_profile():
            pass
        self._profile = new_profile()
        self._range: Any = None

    def start(self, number: int) -> None:  # noqa: D102
        self._profile.start()
        self._begin(number)

    def step_ended(self, number: int) -> None:  # noqa: D102
        self._range.__exit__(None, None, None)
        self._begin(number)

    def stop(self) -> None:  # noqa: D102
        self._range.__exit__(None, None, None)
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))

    def _begin(self, number: int) -> None:
        self._range = torch.profiler.record_function(range_name(number))
        self._range.__enter__()


class CaptureRangeRecorder:
    """cudaProfilerStart and Stop around the window, for nsys or nvprof around this process; steps as NVTX ranges."""

    def __init__(self) -> None:
        self._range = 0

    def start(self, number: int) -> None:  # noqa: D102
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._range = torch.cuda.nvtx.range_start(range_name(number))

    def step_ended(self, number: int) -> None:  # noqa: D102
        torch.cuda.nvtx.range_end(self._range)
        self._range = torch.cuda.nvtx.range_start(range_name(number))

    def stop(self) -> None:  # noqa: D102
        torch.cuda.nvtx.range_end(self._range)
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def range_name(number: int) -> str:
    """Return the name of step ``number``'s range in profilers' files."""
    return f"lmswap step {number}"


def _synchronize() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
