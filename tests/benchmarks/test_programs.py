import json
from dataclasses import replace

import pytest
import torch

from benchmarks.baselines import BASELINES
from benchmarks.programs.__main__ import BUDGET_PERCENTS, STORED, main
from benchmarks.programs.compare import Change, Verdict, change, faster_than_auto, read_outcomes, write_outcomes
from benchmarks.programs.corpus import DATA, MACHINES, load_machine, load_program, machine_names, program_names
from benchmarks.programs.models import KerasInstanceNorm, write_norms_out
from benchmarks.programs.recipes import RECIPES
from benchmarks.programs.replay import replay
from benchmarks.programs.slack import measure
from benchmarks.unet3d.network import NORM_EPS, UNet3d
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.cli import entry
from lmswap.planner import POLICIES
from lmswap.planner.problem import PLANNED_LINK_SHARE

GIB = 2**30


@pytest.fixture(scope="module")
def outcome():
    """swap_all on the smallest program: quick, and the same whenever it is planned."""
    (found,) = replay(["unet3d_96"], ["v100_gen3"], [50], ["swap_all"])
    return found


def changed(outcome, **figures):
    return replace(outcome, plan=replace(outcome.plan, **figures))


def test_a_norm_written_out_is_the_norm():
    x = torch.randn(2, 3, 4, 4, 4)
    norm = torch.nn.InstanceNorm3d(3, eps=NORM_EPS, affine=True)
    torch.testing.assert_close(KerasInstanceNorm(3)(x), norm(x))
    assert not any(isinstance(m, torch.nn.InstanceNorm3d) for m in write_norms_out(UNet3d(base_filters=2)).modules())


# ops, GiB at the peak, TFLOP of forward and backward. The peak leaves out parameters and inputs, which
# live outside the step: at 192³ another 0.136 GiB.
FACTS = {
    "unet3d_96": (407, 1.554, 0.444),
    "unet3d_144": (407, 5.245, 1.497),
    "unet3d_192": (407, 12.432, 3.549),
    "unet3d_192_bf16": (407, 6.216, 3.549),
    "unet3d_192_unfused": (1427, 19.289, 3.549),
    "resnet50": (670, 5.141, 1.555),
    "gpt": (2121, 17.061, 20.259),
    "vit": (1024, 7.127, 6.775),
    "gpt_deep": (51537, 38.612, 20.393),
}


@pytest.mark.parametrize("name", FACTS)
def test_stored_programs_are_of_the_documented_size(name):
    program = load_program(name)
    costs = roofline(program, load_machine("h200_gen5"))
    tera_flops = sum(op.flops for op in program.ops) / 1e12
    assert program.name == name
    peak_gib = StepMemory(program, costs).peak.nbytes / GIB
    assert (len(program.ops), round(peak_gib, 3), round(tera_flops, 3)) == FACTS[name]


def test_every_recipe_is_stored_and_nothing_else():
    assert sorted(program_names()) == sorted(FACTS) == sorted(RECIPES)


@pytest.mark.parametrize("name", machine_names())
def test_machines_hold_swapped_tensors_on_the_first_tier(name):
    machine = load_machine(name)
    assert machine.tiers[0].capacity_bytes > 64 * GIB


def test_unlimited_memory_costs_what_the_ops_cost():
    # 1.95 s: 12 % of 15.7 TFLOP/s for the convolutions, 0.83 TB/s for the rest.
    program = load_program("unet3d_192")
    assert sum(roofline(program, load_machine("v100_gen3")).seconds) == pytest.approx(1.95, abs=0.01)


def test_stored_programs_and_machines_are_what_lmswap_plan_reads(capsys):
    files = [str(DATA / "unet3d_192.json.gz"), "--machine", str(MACHINES / "v100_gen3.json")]
    assert entry.main(["plan", *files, "--budget", "42%", "--policy", "swap_all", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_bytes"] <= figures["budget_bytes"] < 5.23 * GIB


def test_programs_meet_machines_of_their_number_type():
    cases = [o.case for o in replay(["unet3d_96", "unet3d_192_bf16"], ["gh200", "gh200_bf16"], [90], ["none"])]
    assert [(case.program, case.machine) for case in cases] == [
        ("unet3d_96", "gh200"),
        ("unet3d_192_bf16", "gh200_bf16"),
    ]


def test_an_outcome_is_a_plan_in_numbers_or_none(outcome):
    assert outcome.plan.peak_bytes <= outcome.budget_bytes
    assert 0 < outcome.plan.bound_seconds <= outcome.plan.step_seconds
    assert outcome.plan.swapped_bytes > outcome.budget_bytes
    (unfit,) = replay(["unet3d_96"], ["v100_gen3"], [50], ["none"])
    assert unfit.plan is None


def test_a_change_is_judged_by_seconds_then_by_planning(outcome):
    seconds, peak = outcome.plan.step_seconds, outcome.plan.peak_bytes
    slow = replace(outcome, planning_seconds=outcome.planning_seconds * 2 + 1)
    judged = {
        "same": outcome,
        "worse": changed(outcome, step_seconds=seconds * 1.04),
        "better": changed(outcome, step_seconds=seconds * 0.998, peak_bytes=peak * 2),
        "slower planning": slow,
    }
    assert {text: change(outcome, now).verdict for text, now in judged.items()} == {text: text for text in judged}
    assert change(outcome, changed(outcome, peak_bytes=peak * 1.002)) == Change(Verdict.SAME, "peak +0.20%")
    assert change(outcome, changed(outcome, step_seconds=seconds * 1.0005)).verdict is Verdict.SAME


def test_a_plan_that_no_longer_fits_is_worse(outcome):
    unfit = replace(outcome, plan=None)
    assert change(outcome, unfit) == Change(Verdict.WORSE, "does not fit any more")
    assert change(unfit, outcome) == Change(Verdict.BETTER, "fits now")
    assert change(unfit, unfit).verdict is Verdict.SAME
    assert change(None, unfit).verdict is Verdict.NEW


def test_policies_that_beat_auto_are_named(outcome):
    def found_beside(auto):
        return faster_than_auto({o.case: o for o in (outcome, replace(auto, case=replace(auto.case, policy="auto")))})

    seconds = outcome.plan.step_seconds
    assert found_beside(outcome) == found_beside(changed(outcome, step_seconds=seconds * 0.9)) == []
    assert found_beside(changed(outcome, step_seconds=seconds * 1.001)) == [outcome.case]
    assert found_beside(replace(outcome, plan=None)) == [outcome.case]
    assert faster_than_auto({outcome.case: outcome}) == []


def test_no_policy_is_faster_than_auto_on_the_stored_programs():
    outcomes = read_outcomes(STORED)
    compared = [case for case in outcomes if case.policy != "auto"]
    assert {case.policy for case in compared} == {*POLICIES, *BASELINES} - {"auto", "none"}
    assert {case.budget_percent for case in compared} == set(BUDGET_PERCENTS)
    assert faster_than_auto(outcomes) == []


def test_outcomes_are_read_as_they_were_written(outcome, tmp_path):
    outcomes = {o.case: o for o in (outcome, replace(outcome, case=replace(outcome.case, policy="none"), plan=None))}
    write_outcomes(tmp_path / "p.json", outcomes, {"commit": "abc"})
    assert read_outcomes(tmp_path / "p.json") == outcomes
    assert read_outcomes(tmp_path / "none.json") == {}


def test_a_replay_fails_when_a_plan_is_worse_than_the_stored_one(outcome, tmp_path, capsys):
    results = tmp_path / "p.json"
    choice = ["--programs", "unet3d_96", "--machines", "v100_gen3", "--budgets", "50", "--policies", "swap_all"]
    choice += ["--results", str(results)]
    assert main([*choice, "--store"]) == 0
    assert main(choice) == 0
    assert "worse" not in capsys.readouterr().out
    better = changed(outcome, step_seconds=outcome.plan.step_seconds / 2)
    write_outcomes(results, {outcome.case: better}, {})
    assert main(choice) == 1
    printed = capsys.readouterr().out
    assert "worse step +100.00%" in printed
    assert "1 worse" in printed


def test_a_plan_for_a_slower_link_keeps_its_time_when_the_link_is_slower():
    full, slack = measure("unet3d_192", "v100_gen3")
    assert (full["link_share"], slack["link_share"]) == (1.0, PLANNED_LINK_SHARE)
    as_measured, at_90, _ = slack["step_seconds"]
    assert at_90 <= as_measured * 1.001
    assert full["step_seconds"][0] <= as_measured  # what the slack costs where the link is as it was measured
