"""Machine descriptions with extreme numbers: refused when read, or good enough to plan for."""

import contextlib
import json

import pytest

from lmswap.analyze.cost import roofline
from lmswap.errors import OptionError, PlanInfeasible
from lmswap.ir.machine import Machine
from lmswap.planner import make_plan
from tests.ir.build import unit_machine
from tests.reporting.small_step import MIB, PROGRAM

EXTREMES = (0, -1, 0.5, 5e-324, 1e12, 2**62, 2**63, 2**64, 10**30, 1e308, float("inf"), float("nan"))
MACHINE = json.loads(unit_machine().to_json())


def numbers_of(data, at=()):
    """Where in JSON there are numbers: the keys that lead there."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    if isinstance(data, int | float):
        yield at
    for key, value in items:
        yield from numbers_of(value, (*at, key))


def replaced(data, at, number):
    if not at:
        return number
    copied = data.copy()
    copied[at[0]] = replaced(data[at[0]], at[1:], number)
    return copied


@pytest.mark.parametrize("place", list(numbers_of(MACHINE)), ids=lambda at: "-".join(map(str, at)))
def test_an_extreme_number_is_refused_or_can_be_planned_for(place):
    for number in EXTREMES:
        try:
            machine = Machine.from_json(json.dumps(replaced(MACHINE, place, number)))
        except OptionError:
            continue
        costs = roofline(PROGRAM, machine)
        with contextlib.suppress(PlanInfeasible):
            make_plan(
                "auto", PROGRAM, costs, machine, budget_bytes=6 * MIB, tier=machine.tiers[0].name, min_swap_bytes=1
            )
