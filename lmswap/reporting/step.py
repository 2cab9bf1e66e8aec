"""The figures of one model's training step, predicted and measured, and the decision for each buffer."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.timeline import Timeline
from lmswap.reporting.decisions import BufferDecision
from lmswap.verify.summary import Verified


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One model's step as planned and as it ran.

    Predicted fields are None until the step is captured and planned, and where it followed no plan; measured ones until
    a step has finished. Peaks and memory curves count like the budget: the predicted ones include base and reserve.
    Measured peaks cover the time from the end of the previous step to the step's own end; where steps repeat without
    moving anything, also up to seven steps before, as `lmswap.runtime.recorder.STEPS_PER_LAP` says.
    """

    model: str  # display name: "UNet3d"
    device: str  # display name: "cuda:0 (NVIDIA H200)"
    policy: str  # as requested
    plan_origin: str = ""  # "made in 1.2 s", "from cache", or after which step it was replanned
    is_final: bool = True  # the plan, and what is predicted of it, as far as the first steps show
    tier: str
    emulated_link: EmulatedLink | None = None  # the rate to which copies were paced; None: the machine's own speed
    host_budget_bytes: int | None = None  # the tier's limit

    # The budget consists of these three and the rest, for the plan.
    budget_bytes: int
    counted: str  # by the budget, and from when
    base_bytes: int = 0  # in use before the step
    reserve_bytes: int = 0  # expected outside of the plan: optimizer state, gradients in progress, the loss, kernels
    margin_bytes: int = 0  # stays free
    budget_parts: tuple[tuple[str, int], ...] = ()  # the three by what takes them, with names
    uncounted_bytes: int = 0  # of parameters that the budget does not count
    excluded_bytes: int = 0  # that the process holds in addition: resident before, or code loaded since
    gradient_bytes: int = 0  # of the step's own gradients

    steps: int = 0  # finished so far
    step: int | None = None  # the one measured: the last with a backward, or, if none had one, the last
    trains: bool = False  # whether that one had a backward

    predicted_peak_bytes: int | None = None
    unplanned_peak_bytes: int | None = None  # predicted without a plan
    measured_peak_bytes: int | None = None
    measured_tensor_peak_bytes: int | None = None  # the tensors' part of the measured peak; None where unknown
    highest_peak_bytes: int | None = None  # of all steps
    highest_peak_step: int | None = None

    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    free_seconds: float | None = None  # predicted with unlimited memory
    bound_seconds: float | None = None  # no plan is faster, with ops in this order
    stall_seconds: float | None = None  # measured, of compute that waits for copies
    host_bound_seconds: float | None = None  # of segments run as soon as the host had queued them; None on a CPU
    own_seconds: float | None = None  # the host's in lmswap's code, besides ops and planning; None under hooks

    swapped_out_bytes: int | None = None
    swapped_in_bytes: int | None = None
    state_bytes: int = 0  # of optimizer state, gradients and what the CPU updates, in host copies between steps
    state_copied_out_bytes: int = 0  # that an update, and the backward before it, copy out beside the plan
    state_copied_in_bytes: int = 0
    state_out_bytes: int | None = None
    state_in_bytes: int | None = None
    out_bytes_per_second: float | None = None  # measured while at least one copy was under way
    in_bytes_per_second: float | None = None
    recomputed_bytes: int | None = None

    tier_planned_bytes: int | None = None  # that the plan needs
    tier_used_bytes: int = 0  # held now
    tier_peak_bytes: int = 0  # held at most in the measured step
    tier_highest_bytes: int = 0  # held at most ever
    tier_reserved_bytes: int = 0
    tier_reserve_seconds: float = 0.0  # that reserving took
    tier_resident_bytes: int = 0  # the highest memory or disk that it used: less where it compresses

    decisions: tuple[BufferDecision, ...] = ()
    verified: Verified | None = None  # None without verification
    trace_bytes: int = 0  # growth of the process, on a CPU, with traces: graphs, guards, code and plans
    num_traces: int = 0  # one for each shape of inputs, or for all
    num_sized_plans: int = 0  # of traces that serve several sizes
    num_evicted_traces: int = 0
    notes: tuple[str, ...] = ()
    plan_notes: tuple[str, ...] = ()  # on its plans and replanning, which `explain` prints
    predicted: Timeline | None = None
    measured: Timeline | None = None
