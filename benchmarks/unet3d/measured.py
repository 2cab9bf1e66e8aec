"""Measurements of one process of the benchmark: a run, lmswap's report of its last step, or why it failed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import cattrs
from torch import nn

import lmswap
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.memory import thin
from lmswap.ir.program import Program
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.profiling.figures import Figures
from lmswap.profiling.trace import Stall


@dataclass(frozen=True)
class Swapping:
    """What lmswap says of the last step; ``graph_seconds`` is what ``predicted_seconds`` predicts.

    By the costs of ops that ``predicted_seconds`` goes by, the step takes ``free_seconds`` with unlimited memory, and
    no plan less than ``bound_seconds``.
    ``saved_bytes`` is what the forward pass makes and the backward pass reads, whatever is done with it;
    ``forward_seconds`` what the forward pass computed for. ``spans`` are of the last step, ``tensor_memory`` the
    tensors that lmswap saw made and freed in it, as (seconds, bytes).
    """

    policy: str
    predicted_peak_bytes: int | None
    predicted_seconds: float | None
    graph_seconds: float | None
    out_bytes: int | None
    in_bytes: int | None
    recomputed_bytes: int | None
    stall_seconds: float | None
    saved_bytes: int
    forward_seconds: float
    spans: tuple[Span, ...]
    tensor_memory: tuple[tuple[float, int], ...]
    free_seconds: float | None = None  # this and the next are not in files of before they were kept
    bound_seconds: float | None = None

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last step, without its memory curve."""
        return Timeline("measured", self.spans, ())


@dataclass(frozen=True)
class Run:
    """What one configuration did.

    ``peak_bytes`` is as `memory` defines it; ``tensor_peak_bytes`` is the part that tensors held. ``memory`` is
    (seconds, bytes) over the last step. On CUDA, where the host runs ahead, it is that of a further plain step in which
    the host waits for each layer, and for lmswap its own record. ``step_ends`` are on `time.perf_counter`, which all
    processes of a machine share. ``figures`` and ``stalls`` are of the timed steps, where steps take turns of the last
    of them; None where lmswap did not run.
    """

    configuration: Configuration
    device: str
    threads: int
    losses: tuple[float, ...]
    loss_bits: tuple[str, ...]  # the float32 itself, in hexadecimal
    weights_sha256: str
    step_seconds: tuple[float, ...]
    step_ends: tuple[float, ...]
    peak_bytes: int
    tensor_peak_bytes: int | None
    memory: tuple[tuple[float, int], ...]
    swapping: Swapping | None
    figures: Figures | None
    stalls: tuple[Stall, ...]

    @property
    def timed_seconds(self) -> tuple[float, ...]:
        """Seconds of each step, without those that capture, plan and warm up."""
        return self.step_seconds[self.configuration.warm_up_steps :] or self.step_seconds

    @property
    def seconds_per_step(self) -> float:
        """The median over the timed steps."""
        return statistics.median(self.timed_seconds)

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> Run:
        """Rebuilds a run from what `asdict` and JSON made of it."""
        return cattrs.structure(fields, Run)


@dataclass(frozen=True)
class Failure:
    """A configuration that did not finish, and why."""

    configuration: Configuration
    message: str


def swapping_of(model: nn.Module) -> Swapping:
    """The figures of lmswap's report on the last step of ``model``."""
    report, program = lmswap.report(model), lmswap.program(model)
    spans = report.measured.spans if report.measured is not None else ()
    return Swapping(
        policy=report.policy,
        predicted_peak_bytes=report.predicted_peak_bytes,
        predicted_seconds=report.predicted_seconds,
        graph_seconds=report.measured_seconds,
        out_bytes=report.swapped_out_bytes,
        in_bytes=report.swapped_in_bytes,
        recomputed_bytes=report.recomputed_bytes,
        stall_seconds=report.stall_seconds,
        saved_bytes=_saved_bytes(program),
        forward_seconds=sum(s.seconds for s in spans if s.lane is Lane.COMPUTE and s.name.startswith("forward")),
        spans=spans,
        tensor_memory=thin(report.measured.memory if report.measured is not None else ()),
        free_seconds=report.free_seconds,
        bound_seconds=report.bound_seconds,
    )


def _saved_bytes(program: Program) -> int:
    """Bytes of the buffers that forward segments create and backward segments read."""
    made: set[int] = set()
    read: set[int] = set()
    for segment in program.segments:
        ops = program.ops[segment.start : segment.stop]
        if segment.phase == "forward":
            made.update(buffer for op in ops for buffer in op.writes)
        else:
            read.update(buffer for op in ops for buffer in op.reads)
    return sum(program.buffers[buffer].nbytes for buffer in made & read)
