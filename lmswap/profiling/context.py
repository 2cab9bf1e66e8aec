"""Profiling of a part of a script: ``with lmswap.profile() as profile: …``, then ``print(profile)``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmswap import api
from lmswap.errors import OptionError, WindowError
from lmswap.profiling.collect import EngineRecorder
from lmswap.profiling.profile import Profile
from lmswap.profiling.readers import read_traces
from lmswap.profiling.recording import KinetoRecorder, Recording, StepRecorder
from lmswap.profiling.tools import choose, find_profilers
from lmswap.profiling.trace import Trace, side_by_side
from lmswap.profiling.window import StepCounter

_TOOLS = ("auto", "kineto", "lmswap")  # those that can start within a process


@contextmanager
def profile(tool: str = "auto") -> Iterator[Profile]:
    """Profile the training steps in the block: utilization, throughput, overlap, idle time, waits for copies.

    A step ends when the optimizer's step ends; the first one begins with the block, and what follows the last one is
    ignored. The first steps of a model capture and plan it, and lmswap replans last after the fourth: run these before
    the block. With an enabled model, the engine's own record is added to what the tool sees.

    Examples:
        >>> with lmswap.profile() as profile:
        ...     train(model, steps=10)
        >>> print(profile)

    Args:
        tool: "kineto" (torch.profiler), "lmswap" (only the engine's own record), or "auto": Kineto with a GPU, else
            the record.

    Raises:
        OptionError: no such tool here, or no model is enabled and the tool is lmswap's record.
        WindowError: no training step ended in the block.
        TraceError: what Kineto wrote cannot be used.
    """
    if tool in ("nsys", "nvprof"):
        raise OptionError(
            f"{tool} must run around the whole script: lmswap profile --tool {tool} -- python train.py ..."
        )
    used, _ = choose(tool, find_profilers(), _TOOLS)
    result = Profile("steps in a block")
    with tempfile.TemporaryDirectory(prefix="lmswap-profile-") as folder:
        path = Path(folder) / "kineto.json"
        recorders: list[StepRecorder] = [KinetoRecorder(path)] if used == "kineto" else []
        own = EngineRecorder() if api.sessions() or used == "lmswap" else None
        if own is not None:
            recorders.insert(0, own)
        recording = Recording(recorders, 0)
        counter = StepCounter(
            lambda *_: recording.step_ended(), own.optimizer_ran if own is not None else lambda *_: None
        )
        try:
            yield result
        finally:
            counter.close()
            recording.stop()
        steps = recording.steps
        if not steps:
            raise WindowError("no training step ended in the profiled block: no optimizer made a step")
        traces: tuple[Trace, ...] = own.traces(steps) if own is not None else ()
        if used == "kineto":
            traces = side_by_side([trace.steps_between(0, len(steps)) for trace in read_traces(path)], traces)
    result.title = f"{len(steps)} steps in a block"
    result.traces = traces
