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

    ``model`` and ``device`` are display names, "UNet3d" and "cuda:0 (NVIDIA H200)"; ``policy`` is the requested one.

    Predicted fields are None until the step is captured and planned, and where it followed no plan; measured ones until
    a step has finished. They are of step number ``step``: the last with a backward, or, if none of the ``steps`` so far
    had one, the last; ``trains`` says which. Measured peaks cover the time from the end of the previous step to the
    step's own end; the highest so far was ``highest_peak_bytes``, in step ``highest_peak_step``.

    The budget consists of the bytes held before the step (``base_bytes``), an allowance for the allocator and for
    kernels' scratch memory (``reserve_bytes``), a margin that stays free (``margin_bytes``), and the rest, for the
    plan. Peaks and memory curves count like the budget: the predicted ones include base and reserve. Without a plan the
    peak would be ``unplanned_peak_bytes``, as predicted. ``measured_tensor_peak_bytes`` is the tensors' part of the
    measured peak, None where unknown. Tier bytes are those that the plan needs (planned), that the tier holds now
    (used), held at most in that step (peak) and ever (highest), and those reserved for that, which took
    ``tier_reserve_seconds``; ``host_budget_bytes`` is the tier's limit. ``tier_resident_bytes`` is the highest memory
    or disk that it used: less where it compresses.

    Of the measured seconds, ``host_bound_seconds`` are of forwards or backwards that the device ran as soon as the host
    had queued them; None on a CPU, which is both.

    ``emulated_link`` is the rate to which copies were paced, None at the machine's own speed; ``out_bytes_per_second``
    and ``in_bytes_per_second`` are the rates while at least one copy was under way. The step would take
    ``free_seconds`` with unlimited memory, and no plan is faster than ``bound_seconds`` with ops in this order;
    ``plan_origin`` says where the plan comes from: "made in 1.2 s", "from cache", or after which step it was replanned.
    On a CPU ``trace_bytes`` is by how much, beside tensors, the process has grown with ``num_traces``: graphs, guards,
    code and plans, for each shape of inputs; ``num_evicted_traces`` are gone again.
    ``verified`` holds the checks of verification, None without it. ``plan_notes`` are sentences on its plans and
    replanning, which `explain` prints; ``notes`` are all others.
    """

    model: str
    device: str
    policy: str
    plan_origin: str = ""
    tier: str
    emulated_link: EmulatedLink | None = None
    host_budget_bytes: int | None = None
    budget_bytes: int
    base_bytes: int = 0
    reserve_bytes: int = 0
    margin_bytes: int = 0
    steps: int = 0
    step: int | None = None
    trains: bool = False
    predicted_peak_bytes: int | None = None
    unplanned_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_tensor_peak_bytes: int | None = None
    highest_peak_bytes: int | None = None
    highest_peak_step: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    free_seconds: float | None = None
    bound_seconds: float | None = None
    swapped_out_bytes: int | None = None
    swapped_in_bytes: int | None = None
    out_bytes_per_second: float | None = None
    in_bytes_per_second: float | None = None
    recomputed_bytes: int | None = None
    stall_seconds: float | None = None
    host_bound_seconds: float | None = None
    tier_planned_bytes: int | None = None
    tier_used_bytes: int = 0
    tier_peak_bytes: int = 0
    tier_highest_bytes: int = 0
    tier_reserved_bytes: int = 0
    tier_reserve_seconds: float = 0.0
    tier_resident_bytes: int = 0
    decisions: tuple[BufferDecision, ...] = ()
    verified: Verified | None = None
    trace_bytes: int = 0
    num_traces: int = 0
    num_evicted_traces: int = 0
    notes: tuple[str, ...] = ()
    plan_notes: tuple[str, ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
