"""A planner whose verified plans swap and recompute at random."""

import random
from dataclasses import replace

from lmswap.ir.schedule import schedule
from lmswap.planner import simulate, verify
from tests.rewrite.random_plans import random_plan
from tests.rewrite.random_recomputes import random_recomputes


def plan_at_random(seed: int, share: float = 0.5):
    """Return a stand-in for `lmswap.planner.make_plan`, which recomputes a ``share`` of what it can."""
    rng = random.Random(seed)

    def make_plan(policy, program, costs, machine, **limits):
        recomputes = random_recomputes(program, rng, share=share)
        runs = schedule(program, recomputes)
        swaps = random_plan(runs.program, rng, share=0.5, tier=machine.tiers[0].name)
        plan = replace(swaps, policy="random", recomputes=recomputes)
        plan = replace(plan, swaps=tuple(sorted(plan.swaps, key=lambda swap: swap.first_use)))
        plan = replace(plan, predicted_peak_bytes=simulate(program, costs, machine, plan).peak_bytes)
        verify(program, costs, machine, plan)
        return plan

    return make_plan
