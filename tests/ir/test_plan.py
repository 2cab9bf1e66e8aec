import json
import math

import pytest

from lmswap.errors import OptionError
from lmswap.ir import plan as plan_module
from lmswap.ir.certificate import Certificate
from lmswap.ir.plan import Plan, Recompute, Swap

PLAN = Plan(
    policy="auto",
    budget_bytes=100,
    swaps=(Swap(1, "host", 0, 1, 2, 3, 4), Swap(1, "host", 0, None, 5, 6, 7)),
    predicted_seconds=1.5,
    predicted_peak_bytes=90,
    tier_bytes={"host": 4096},
    reasons={1: "swap: idle", 2: "keep"},
    recomputes=(Recompute(0, 3),),
    certificate=Certificate(1.2, (3,), (0.1,), (0.0, 0.5), (0.25, 0.0)),
)


def test_json_keeps_every_plan():
    for plan in (PLAN, Plan("none", 1, (), 0.0, 0), Plan("none", 1, (), 0.0, 0, certificate=Certificate(math.inf))):
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("field", ["swaps", "reruns", "certificate", "predicted_seconds", "reasons"])
def test_a_damaged_field_is_an_option_error(field):
    damage = {**json.loads(PLAN.to_json()), field: "x"}
    with pytest.raises(OptionError, match="plan file is damaged"):
        Plan.from_json(json.dumps(damage))


@pytest.mark.parametrize("field", ["swaps", "reruns", "predicted_seconds"])
def test_a_missing_field_without_a_default_is_an_option_error(field):
    data = json.loads(PLAN.to_json())
    del data[field]
    with pytest.raises(OptionError, match="plan file is damaged: KeyError"):
        Plan.from_json(json.dumps(data))


def test_a_plan_is_as_far_above_the_best_as_its_certificate_leaves_open():
    assert PLAN.excess == pytest.approx(0.25)
    assert Plan("none", 1, (), 0.0, 0).excess is None


def test_former_names_are_the_same_objects_with_a_deprecation_warning():
    with pytest.warns(DeprecationWarning, match="lmswap.ir.plan.Rerun is now lmswap.ir.plan.Recompute") as warned:
        assert plan_module.Rerun is Recompute
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"Plan\.reruns is now Plan\.recomputes") as warned:
        assert PLAN.reruns is PLAN.recomputes
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Rerum'"):
        plan_module.Rerum  # noqa: B018
