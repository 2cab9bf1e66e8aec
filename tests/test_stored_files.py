"""Files of the first public formats, written by an early version, can still be read.

All are of one training step of three linear layers. Stored programs are in benchmarks/programs/data.
"""

import json
from pathlib import Path

import pytest

from lmswap.ir.machine import Machine
from lmswap.planner.cache import CachedPlan
from lmswap.session.plan_file import PinnedPlans

STORED = Path(__file__).parent / "stored"


@pytest.mark.parametrize(("name", "num_swaps", "num_recomputes"), [("plan_swap", 2, 0), ("plan_recompute", 0, 2)])
def test_plan_files_are_read_and_pass_the_verifier(name, num_swaps, num_recomputes):
    plans = PinnedPlans.read(str(STORED / f"{name}.json"))
    [(program, planned)] = plans.steps
    assert (len(planned.plan.swaps), len(planned.plan.recomputes)) == (num_swaps, num_recomputes)
    assert PinnedPlans.from_json(plans.to_json()) == plans
    assert len(program.ops) == 37


def test_cached_plans_are_read():
    data = json.loads((STORED / "cached_plan.json").read_text(encoding="utf-8"))
    [(program, planned)] = PinnedPlans.read(str(STORED / "plan_swap.json")).steps
    cached = CachedPlan.from_data(data, len(program.ops))
    assert cached.plan.acts_as(planned.plan)
    assert cached.machine == planned.machine


def test_measured_machines_are_read():
    machine = Machine.from_json((STORED / "machine.json").read_text(encoding="utf-8"))
    assert machine.tier("disk").link.busy_factor == pytest.approx(0.8498, abs=1e-4)
