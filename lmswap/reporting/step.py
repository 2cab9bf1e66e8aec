"""What is known of one model's training step? Figures, predicted beside measured, and what became of each buffer."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.ir.emulation import EmulatedLink
from lmswap.ir.timeline import Timeline
from lmswap.ir.verification import Verified
from lmswap.reporting.decisions import BufferDecision


@dataclass(frozen=True)
class StepFigures:
    """One model's step as planned and as it ran.

    Predicted fields are None until the step is captured and planned, and where it followed no plan, measured ones until
    a step has finished. They are of step number ``step``: the last that had a backward, or, if none of the ``steps`` so
    far had one, the last; ``trains`` says which. Measured peaks are of all that happened from the end of the step
    before it to its own end; the highest so far was ``highest_peak_bytes``, in step ``highest_peak_step``.

    The budget is made of what was there before the step (``base_bytes``), an allowance for the allocator and for
    scratch of kernels (``reserve_bytes``), a margin that stays free (``margin_bytes``), and the rest, which the plan
    fills. Peaks and memory curves count like the budget: base and reserve are part of the predicted ones.
    Without a plan the peak would be ``unplanned_peak_bytes``, as predicted.
    ``measured_tensor_peak_bytes`` is the part of the measured peak that tensors held, None where it is not known. Tier
    bytes are what the plan needs there, what the tier holds now, held at most in that step and has ever held, and what
    is reserved for that, which took ``tier_reserve_seconds``; ``host_budget_bytes`` is what it may hold. Memory or disk
    that it took for that at most is ``tier_resident_bytes``: less where it compresses.

    Of the measured seconds the device spent ``host_bound_seconds`` in a forward or backward that it had run as soon as
    the host had queued it; None on a CPU, which is both.

    ``emulated_link`` is what copies were paced to, None where they ran at the machine's own speed;
    ``out_bytes_per_second`` and ``in_bytes_per_second`` are what they reached while at least one was under way. The
    step would take ``free_seconds`` with unlimited memory, and no plan is faster than ``bound_seconds`` while ops keep
    their order; ``plan_origin`` says where the plan comes from: "made in 1.2 s", "from cache", "made again after step
    3". ``verified`` is what verification has checked, None where it was not asked for. ``plan_notes`` are sentences on
    what became of its plans, which `explain` prints; ``notes`` are all others.
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
    notes: tuple[str, ...]
    plan_notes: tuple[str, ...]
    predicted: Timeline | None
    measured: Timeline | None
