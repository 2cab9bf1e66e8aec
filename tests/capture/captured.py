"""Captures a model's graphs and lowers them, without swapping anything."""

from __future__ import annotations

from typing import Any

import torch

from lmswap.analyze.cost import unit
from lmswap.capture.aot import GraphHandler, compile_region
from lmswap.capture.lower import Lowered, lower
from lmswap.capture.op_costs.benchmark import OpProfiler
from lmswap.runtime.codegen import compile_boxed


class NoMemory:
    """Stands for a device's memory where none is counted."""

    def used_tensor_bytes(self):
        return 0

    peak_tensor_bytes = other_bytes = used_tensor_bytes

    def reports_changes(self):
        return True

    def tensor_changes(self, start_seconds, stop_seconds):
        return ()

    def reset_tensor_peak(self):
        pass

    synchronize = trim = reset_tensor_peak


METER = OpProfiler(torch.device("cpu"), NoMemory(), unit)


class Recording(GraphHandler):
    """A graph handler that keeps what was lowered and leaves the graphs as they are."""

    output_metadata = METER.output_metadata

    def __init__(self) -> None:
        self.lowered: list[Lowered] = []
        self.notes: list[str] = []

    def note(self, text):
        self.notes.append(text)

    def edit(self, graphs, parameters):
        self.lowered.append(lower(graphs, parameters=parameters, name="captured"))

    def compiled(self, module, phase):
        return compile_boxed(module)


def capture(model: Any, *inputs: torch.Tensor) -> tuple[Recording, Any]:
    """Runs ``model`` once through AOTAutograd; gives what was lowered, and the output."""
    torch.compiler.reset()
    recording = Recording()
    compiled = torch.compile(
        model, backend=lambda module, example: compile_region(module, example, recording), dynamic=False
    )
    return recording, compiled(*inputs)
