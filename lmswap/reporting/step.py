"""The figures of one model's training step, predicted and measured, and the decision for each buffer."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.timeline import Timeline
from lmswap.reporting.decisions import BufferDecision
from lmswap.verify.summary import Verified


@dataclass(frozen=True)
class StepFigures:
    """One model's step as planned and as it ran.

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
    plan_origin: str
    tier: str
    emulated_link: EmulatedLink | None
    host_budget_bytes: int | None
    budget_bytes: int
    base_bytes: int
    reserve_bytes: int
    margin_bytes: int
    steps: int
    step: int | None
    trains: bool
    predicted_peak_bytes: int | None
    unplanned_peak_bytes: int | None
    measured_peak_bytes: int | None
    measured_tensor_peak_bytes: int | None
    highest_peak_bytes: int | None
    highest_peak_step: int | None
    predicted_seconds: float | None
    measured_seconds: float | None
    free_seconds: float | None
    bound_seconds: float | None
    swapped_out_bytes: int | None
    swapped_in_bytes: int | None
    out_bytes_per_second: float | None
    in_bytes_per_second: float | None
    recomputed_bytes: int | None
    stall_seconds: float | None
    host_bound_seconds: float | None
    tier_planned_bytes: int | None
    tier_used_bytes: int
    tier_peak_bytes: int
    tier_highest_bytes: int
    tier_reserved_bytes: int
    tier_reserve_seconds: float
    tier_resident_bytes: int
    decisions: tuple[BufferDecision, ...]
    verified: Verified | None
    trace_bytes: int
    num_traces: int
    num_evicted_traces: int
    notes: tuple[str, ...]
    plan_notes: tuple[str, ...]
    predicted: Timeline | None
    measured: Timeline | None
