"""The part of an enabled model that all stages of its session share."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.hardware.local_ranks import LocalRanks
from lmswap.hardware.memory import DeviceMemory
from lmswap.options import Options
from lmswap.runtime.engine import SwapEngine
from lmswap.session.budget import BudgetTracker
from lmswap.session.diagnostics import Notes
from lmswap.session.engine_setup import KnownMachine
from lmswap.session.plan_file import PinnedPlans
from lmswap.session.retention import RetentionEstimate
from lmswap.training_state.weights import Weights


@dataclass(frozen=True)
class ModelContext:
    """One enabled model: its options, what runs it, and what is known of its memory and machine."""

    name: str  # for reports
    options: Options
    engine: SwapEngine
    memory: DeviceMemory
    budget: BudgetTracker
    retention: RetentionEstimate
    machine: KnownMachine
    plan_notes: Notes  # on its plans and their replacement, for reports
    weights: Weights
    pinned: PinnedPlans | None = None  # plans to follow, without planning
    node: LocalRanks | None = None  # whose ranks measure and plan together
