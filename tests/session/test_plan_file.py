"""A plan that is kept in a file: what is read is what was written, what is followed is what was read, or nothing is."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lmswap
from lmswap.analyze.memory import StepMemory
from lmswap.cli import entry
from lmswap.errors import LmswapError, OptionError, PlanInfeasible, PlanMismatch
from lmswap.ir.emulation import EmulatedLink
from lmswap.options import Options
from lmswap.planner import make_plan
from lmswap.planner.cache import CachedPlan, PlannedMemory
from lmswap.session import planner
from lmswap.session.plan_file import PinnedPlans, pinned_options
from tests.cli.terminal_width import too_wide
from tests.ir.build import build
from tests.ir.damage import damaged
from tests.ir.strategies import machines, steps
from tests.models import CASES

SMALL = 4096
OPTIONS = {"budget": "4GiB", "policy": "swap_all", "min_swap_bytes": SMALL}


@st.composite
def pinned_plans(draw):
    step, machine = draw(steps()), draw(machines())
    peak_bytes = StepMemory(step.program, step.costs).peak.nbytes
    budget_bytes = draw(st.integers(peak_bytes // 2 + 1, peak_bytes + 1))
    policy = draw(st.sampled_from(["swap", "swap_all", "recompute"]))
    limits = {"tier": "host", "min_swap_bytes": 1}
    try:
        plan = make_plan(policy, step.program, step.costs, machine, budget_bytes=budget_bytes, **limits)
    except PlanInfeasible:
        budget_bytes = 2 * peak_bytes
        plan = make_plan(policy, step.program, step.costs, machine, budget_bytes=budget_bytes, **limits)
    given = Options.parse(policy=policy, tier="host", min_swap_bytes=1)
    options = pinned_options(replace(given, budget_bytes=budget_bytes))
    return PinnedPlans(
        "random", options, ((step.program, CachedPlan(plan, step.costs, machine, PlannedMemory(budget_bytes))),)
    )


class Broken(nn.Module):
    """A break cuts it into two graphs, which follow one plan from the second step on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


MODELS = {
    "resnet": (CASES["resnet"].make, CASES["resnet"].batch, {}),
    "resnet by hooks": (CASES["resnet"].make, CASES["resnet"].batch, {"compiler": "eager"}),
    "two graphs": (Broken, lambda: torch.randn(64, 64), {}),
}


def train(make, batch, *, save=None, num_steps=6, **options):
    """Losses and gradients of some steps under ``options``, or plainly, and the report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = make()
    if options:
        lmswap.enable(model, **options)
    results = []
    for _ in range(num_steps):
        model.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        results += [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
    if save:
        lmswap.save_plan(model, save)
    report = lmswap.report(model) if options else None
    lmswap.disable(model)
    return results, report


@cache
def plan_of_resnet():
    """What is written of a plan that swaps all it can."""
    make, batch, _ = MODELS["resnet"]
    with TemporaryDirectory() as folder:
        train(make, batch, save=f"{folder}/step.json", num_steps=2, **OPTIONS)
        return Path(f"{folder}/step.json").read_text()


@pytest.fixture
def file(tmp_path):
    """A small net's plan."""
    file = tmp_path / "step.json"
    file.write_text(plan_of_resnet())
    return file


def swaps_of(file):
    return [(planned.plan.swaps, planned.plan.recomputes) for _, planned in PinnedPlans.read(str(file)).steps]


def changed(file, change):
    """The file with its first step, as JSON has it, changed."""
    data = json.loads(file.read_text())
    change(data["steps"][0])
    file.write_text(json.dumps(data))
    return file


@given(pinned_plans())
def test_written_plans_are_read_back(plans):
    assert PinnedPlans.from_json(plans.to_json()) == plans


@pytest.mark.slow
@given(pinned_plans(), st.data())
def test_a_damaged_file_is_refused_or_still_valid(plans, data):
    try:
        read = PinnedPlans.from_json(data.draw(damaged(plans.to_json())))
    except LmswapError:
        return
    assert PinnedPlans.from_json(read.to_json()) == read


@pytest.mark.slow
@given(pinned_plans())
def test_each_decision_is_one_line(plans):
    lines = [line.strip() for line in plans.to_json().splitlines()]
    decisions = json.loads(plans.to_json())["steps"][0]["decisions"]
    assert all(
        lines.count(json.dumps(decision)) + lines.count(f"{json.dumps(decision)},") == 1 for decision in decisions
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_plan_file_is_bitwise_equal_and_plans_nothing(name, tmp_path, monkeypatch):
    make, batch, options = MODELS[name]
    file = tmp_path / "step.json"
    expected, _ = train(make, batch)
    train(make, batch, save=file, **OPTIONS, **options)
    assert any(swaps for swaps, _ in swaps_of(file))

    def refuse(*_, **__):
        raise AssertionError("a pinned model has nothing to plan")

    monkeypatch.setattr(planner, "make_plan", refuse)
    again = tmp_path / "again.json"
    found, report = train(make, batch, save=again, plan=file)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert swaps_of(again) == swaps_of(file)
    assert report.plan_origin == f"that of '{file}'"
    assert report.budget_bytes == 4 * 2**30


def test_a_plan_file_stays_active_despite_wrong_predictions(file):
    changed(file, lambda step: step["costs"].update(seconds=[9.0] * len(step["costs"]["seconds"]), source="wrong"))
    data = json.loads(file.read_text())
    data["steps"][0]["plan"]["certificate"] = None  # it proves nothing by such costs
    file.write_text(json.dumps(data))
    make, batch, _ = MODELS["resnet"]
    _, report = train(make, batch, plan=file)
    assert report.plan_origin == f"that of '{file}'"


def test_names_and_lines_of_code_may_change(file):
    ((program, planned),) = PinnedPlans.read(str(file)).steps
    other = replace(program, name="Other", ops=tuple(replace(op, source="elsewhere.py:1") for op in program.ops))
    assert PinnedPlans.read(str(file)).find(other) == planned


def test_a_plan_file_of_another_step_is_refused_with_the_first_difference(file):
    _, batch, _ = MODELS["resnet"]
    with pytest.raises(PlanMismatch, match=r"no step like this one: op \d+ is aten\..* in the file, and aten\..* here"):
        train(lambda: nn.Conv2d(3, 16, 5), batch, plan=file)


STEP = """
    forward
    f1 1: x w -> a b
    f2 1: a -> y
    """
SIZES = {"x": 4096, "w": 2**20, "a": 2**23, "b": 2**23}


@pytest.mark.parametrize(
    ("text", "sizes", "said"),
    [
        (STEP, {"a": 2**22}, r"op 0 is test.f1 that makes 8.00 MiB, 8.00 MiB \(.* that makes 4.00 MiB, 8.00 MiB \("),
        (STEP, {"w": 2**21}, r"8.00 MiB from 4.00 KiB, 1.00 MiB \(.* 8.00 MiB from 4.00 KiB, 2.00 MiB \("),
        (STEP, {"w": 2**20 + 1}, r", buffer 1 of 1048576 B \(.*\) in the file, and .*, buffer 1 of 1048577 B \("),
        (STEP.replace(": a", ": b"), {}, r"op 1 is .* from buffer 2 of 8388608 B \(.* from buffer 3 of 8388608 B \("),
        (STEP + "f3 1: y -> z", {"w": 1}, "op 0 is .* here; it has 2 ops in the file, and 3 here$"),
        (STEP + "f3 1: y -> z", {}, "no step like this one: it has 2 ops in the file, and 3 here$"),
    ],
    ids=["makes", "reads", "a byte", "another tensor", "makes, and length", "length"],
)
def test_two_ops_are_described_by_what_differs(text, sizes, said):
    known, other = build(STEP, sizes=SIZES).program, build(text, sizes=SIZES | sizes).program
    plans = PinnedPlans("Net", Options.parse(2**30, tier="host", min_swap_bytes=1), ((known, None),))
    with pytest.raises(PlanMismatch, match=said):
        plans.find(other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "2GiB"}, "budget was given as 2.00 GiB, and plan .* was made with 4.00 GiB"),
        ({"budget": 2**32 + 1}, "budget was given as 4294967297 B, and plan .* was made with 4294967296 B"),
        ({"policy": "recompute"}, "policy was given as 'recompute', and plan .* was made with 'swap_all'"),
        ({"min_swap_bytes": 5}, "min_swap_bytes was given as 5 B, and plan .* 4.00 KiB"),
        ({"plan": 3}, "plan must be the path of a file"),
        ({"plan": "missing.json"}, "cannot read plan 'missing.json': No such file or directory$"),
    ],
)
def test_options_that_differ_from_those_of_the_file_are_refused(file, options, said):
    with pytest.raises(OptionError, match=said):
        lmswap.enable(CASES["resnet"].make(), **{"plan": file, **options})


def test_another_device_is_refused(file):
    changed(file, lambda step: step["machine"].update(name="cuda:0 (NVIDIA V100)"))
    with pytest.raises(PlanMismatch, match=r"is for cuda:0 \(NVIDIA V100\); this is "):
        lmswap.enable(CASES["resnet"].make(), plan=file)


def test_a_budget_that_the_process_has_outgrown_is_refused(file):
    data = json.loads(file.read_text())
    ((_, planned),) = PinnedPlans.read(str(file)).steps
    data["options"]["budget_bytes"] = planned.plan.predicted_peak_bytes
    data["steps"][0]["plan"]["budget_bytes"] = planned.plan.predicted_peak_bytes
    data["steps"][0]["plan"]["certificate"] = None
    file.write_text(json.dumps(data))
    make, batch, _ = MODELS["resnet"]
    with pytest.raises(PlanMismatch, match="are in use before the step and reserved: more than the budget"):
        train(make, batch, plan=file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda step: step["plan"]["swaps"][0].update(first_use=0), "breaks the rule 'order'"),
        (lambda step: step["plan"]["swaps"][0].update(offset=-4096), "breaks the rule 'tier'"),
        (lambda step: step["plan"].update(predicted_peak_bytes=1), "breaks the rule 'prediction'"),
        (lambda step: step["plan"]["swaps"].clear(), "breaks the rule|its decisions say"),
        (lambda step: step["decisions"][0].update(buffer="other"), "its decisions say .*'other'.*, its plan"),
        (lambda step: step["decisions"].pop(), "its decisions say nothing"),
    ],
)
def test_a_modified_plan_is_refused(file, change, said):
    with pytest.raises(PlanMismatch, match=said):
        lmswap.enable(CASES["resnet"].make(), plan=changed(file, change))


def test_a_model_that_has_planned_nothing_has_no_plan_to_save(tmp_path):
    model = lmswap.enable(CASES["resnet"].make(), budget="4GiB")
    with pytest.raises(OptionError, match="nothing is planned"):
        lmswap.save_plan(model, tmp_path / "step.json")
    lmswap.disable(model)


def test_a_difference_of_plans_names_the_buffers(file, tmp_path, capsys):
    make, batch, _ = MODELS["resnet"]
    kept = tmp_path / "kept.json"
    train(make, batch, save=kept, num_steps=2, **{**OPTIONS, "policy": "none"})
    assert entry.main(["diff", str(file), str(file)]) == 0
    assert "0 of " in capsys.readouterr().out
    assert entry.main(["diff", str(file), str(kept)]) == 1
    shown = capsys.readouterr().out
    assert not too_wide(shown)
    decisions = json.loads(file.read_text())["steps"][0]["decisions"]
    assert decisions and all(decision["buffer"] in shown for decision in decisions)
    assert shown.count("swap → keep") == len(decisions)


def test_steps_of_one_file_only_are_a_difference(file, tmp_path, capsys):
    train(*MODELS["two graphs"][:2], save=tmp_path / "other.json", num_steps=2, **OPTIONS)
    assert entry.main(["diff", str(file), str(tmp_path / "other.json")]) == 1
    shown = capsys.readouterr().out
    assert not too_wide(shown)
    assert f"isonlyin{file}" in "".join(shown.split())


@pytest.fixture
def paced(tmp_path):
    """A small net's plan for an emulated link, as JSON has it."""
    file = tmp_path / "paced.json"
    train(
        *MODELS["resnet"][:2], save=file, num_steps=2, link=EmulatedLink(40e6, 50e6, str(tmp_path / "bus")), **OPTIONS
    )
    (tmp_path / "bus").unlink()
    return file


def test_a_plan_file_that_names_a_shared_links_file_is_refused(paced, tmp_path):
    data = json.loads(paced.read_text())
    planted, empty = tmp_path / "planted", tmp_path / "empty"
    empty.touch()
    for path in (planted, empty):
        data["options"]["link"]["shared_file"] = str(path)
        paced.write_text(json.dumps(data))
        with pytest.raises(OptionError, match=f"its link is shared by the file '{path}', which a plan must not choose"):
            lmswap.enable(CASES["resnet"].make(), plan=paced)
    assert not planted.exists() and empty.read_bytes() == b""


def test_a_plan_of_a_shared_link_is_saved_without_its_file(paced, tmp_path):
    assert json.loads(paced.read_text())["options"]["link"]["shared_file"] is None
    bus = tmp_path / "another bus"
    _, alone = train(*MODELS["resnet"][:2], num_steps=2, plan=paced)
    assert alone.emulated_link == EmulatedLink(40e6, 50e6)
    _, shared = train(*MODELS["resnet"][:2], num_steps=2, plan=paced, link=EmulatedLink(40e6, 50e6, str(bus)))
    assert shared.emulated_link == EmulatedLink(40e6, 50e6, str(bus)) and bus.exists()
    with pytest.raises(OptionError, match=r"link was given as 0.04 GB/s out, 0.06 GB/s in"):
        lmswap.enable(CASES["resnet"].make(), plan=paced, link=EmulatedLink(40e6, 60e6))


@pytest.mark.parametrize(
    ("option", "value"), [("policy", "best"), ("tier", "tape"), ("compiler", "gcc"), ("compiler", "eager")]
)
def test_options_of_a_plan_file_are_checked_as_arguments_are(file, option, value):
    data = json.loads(file.read_text())
    data["options"].update({"policy": "recompute", option: value})
    file.write_text(json.dumps(data))
    with pytest.raises(
        OptionError, match=f"plan '{file}' cannot be followed: .*({option} '{value}'|'{value}' has none)"
    ):
        lmswap.enable(CASES["resnet"].make(), plan=file)


@pytest.mark.parametrize("option", ["budget_bytes", "min_swap_bytes"])
@pytest.mark.parametrize("nbytes", [10**400, 2**63, 0, -1], ids=["400 digits", "2^63", "0", "-1"])
def test_byte_counts_of_a_plan_file_are_checked_as_arguments_are(file, option, nbytes):
    data = json.loads(file.read_text())
    data["options"][option] = nbytes
    file.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=f"{option.removesuffix('_bytes')}.* (is beyond 1048576|must be more than 0)"):
        lmswap.enable(CASES["resnet"].make(), plan=file)
