"""A budget means the same to `lmswap.enable`, `lmswap.least_budget` and `lmswap plan`, and refusals itemize it."""

import json
import re
from bisect import bisect_left
from dataclasses import replace

import pytest
import torch
from torch import nn

import lmswap
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.cli import entry
from lmswap.cli.step_plan import plan_within
from lmswap.errors import PlanInfeasible
from lmswap.hardware import memory
from lmswap.planner import make_plan
from lmswap.session import planner
from tests.models import Case
from tests.reporting.small_step import MACHINE
from tests.resident import memory_of_tensors
from tests.session.training import train

MIB = 2**20

pytestmark = [
    pytest.mark.cpu_only("an arena's holes on a GPU are known to enable alone"),
    pytest.mark.usefixtures("no_garbage"),
]

CASES = {
    "norms": Case(
        lambda: nn.Sequential(*(layer for _ in range(3) for layer in (nn.LayerNorm(128), nn.GELU()))),
        lambda: torch.randn(2**14, 128),
    ),
    "linear": Case(
        lambda: nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.Tanh()))),
        lambda: torch.randn(2**13, 256),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _resident_memory_is_the_heap():
    with memory_of_tensors():
        yield


def captured(case):
    """The program of a step, and the least budget that `lmswap.least_budget` names."""
    torch.compiler.reset()
    model = lmswap.enable(case.make(), "4GiB", min_swap_bytes=4096)
    case.loss(model(case.batch())).backward()
    found = lmswap.program(model), lmswap.least_budget(model)
    lmswap.disable(model)
    return found


def is_planned(program, budget_bytes):
    """Whether `lmswap plan` finds a plan."""
    memory = StepMemory(program, roofline(program, MACHINE))
    try:
        plan_within("auto", memory, MACHINE, budget_bytes=budget_bytes, tier="disk", min_swap_bytes=4096)
    except PlanInfeasible as error:
        assert sum(nbytes for _, nbytes in error.parts) == error.needed_bytes > budget_bytes
        return False
    return True


def is_enabled(case, budget_bytes):
    """Whether `lmswap.enable` does."""
    try:
        train(case, budget=budget_bytes, policy="auto")
    except PlanInfeasible as error:
        assert sum(nbytes for _, nbytes in error.parts) == error.needed_bytes > budget_bytes
        return False
    return True


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # which reads the real process
@pytest.mark.parametrize("name", CASES)
def test_enable_and_the_command_accept_the_same_budgets(name):
    program, least_bytes = captured(CASES[name])
    budgets = range(least_bytes - 8 * MIB, least_bytes + 8 * MIB, MIB)
    least_planned = budgets[bisect_left(budgets, True, key=lambda budget: is_planned(program, budget))]
    assert abs(least_planned - least_bytes) <= MIB
    assert is_enabled(CASES[name], max(least_planned, least_bytes) + MIB)
    assert not is_enabled(CASES[name], min(least_planned, least_bytes) - 2 * MIB)


def test_the_command_states_what_its_budget_counts(tmp_path, capsys):
    program, least_bytes = captured(CASES["norms"])
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    (tmp_path / "program.json").write_text(program.to_json())
    command = ["plan", f"{tmp_path}/program.json", "--machine", f"{tmp_path}/machine.json", "--budget"]
    assert entry.main([*command, str(least_bytes + MIB)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "before the step" in text and "margin" in text and "counted as by lmswap.enable" in text
    assert entry.main([*command, "100%", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["budget_bytes"] - figures["step_budget_bytes"] == program.fixed.total_bytes()
    assert figures["peak_bytes"] <= figures["budget_bytes"]


@pytest.mark.parametrize(("budget", "unit"), [("0.02GiB", "GiB"), ("20MB", "MB"), (20 * MIB, "MiB")])
def test_a_refusal_itemizes_the_least_budget_in_the_given_unit(budget, unit):
    with pytest.raises(PlanInfeasible) as refused:
        train(CASES["norms"], budget=budget, policy="none")
    error, text = refused.value, one_line(refused.value)
    assert [what for what, n in error.parts if n][:3] == ["before the step", "reserved for optimizer state", "margin"]
    assert sum(nbytes for _, nbytes in error.parts) == error.needed_bytes
    assert f" {unit} (growth of resident memory since enable, less code): it needs at least " in text
    assert f" {unit} for the step's tensors No optimizer exists yet" in text
    assert " The most is needed at op " in text
    assert (" MiB" in text) == (unit == "MiB")


def test_a_share_that_is_widened_is_refused_by_one_search(monkeypatch):
    refused = []

    def make(*args, budget_bytes, **options):
        try:
            return make_plan(*args, budget_bytes=budget_bytes, **options)
        except PlanInfeasible:
            refused.append(budget_bytes)
            raise

    monkeypatch.setattr(planner, "make_plan", make)
    _, report = train(CASES["norms"], budget="2%")
    assert any("is too small for this step: the least that works" in note for note in report.notes)
    assert len(refused) == 1


def test_a_refused_share_states_which_would_suffice(monkeypatch):
    monkeypatch.setattr(memory.CpuMemory, "free_bytes", lambda _: 0)
    text = one_line(refusal_of(CASES["norms"], "2%"))
    assert re.search(r"into 2% \(.* MiB, .*\): it needs at least [0-9.]+% \([0-9.]+ MiB\) [0-9.]+ MiB ", text)


def test_a_refusal_has_a_line_for_each_part_and_tensor_and_advice_at_its_end_within_80_characters():
    error = PlanInfeasible(
        budget_bytes=60 * MIB,
        needed_bytes=130 * MIB,
        where="op 136 'gelu_backward_11' (network.py:71 mixed: Tensor = self.localize(torch.cat([skip, self.up(x)]))",
        live=(("0.0: addmm", 80 * MIB), ("11.1: gelu", 8 * MIB)),
        policy="auto",
        parts=(("before the step", 34 * MIB), ("margin", 0), ("for the step's tensors", 96 * MIB)),
        counted="growth of resident memory since enable, less code",
        uncounted_bytes=3 * MIB,
        gradient_bytes=3 * MIB,
        instead="or policy='auto', which fits",
    )
    lines = f"lmswap.errors.PlanInfeasible: {error}".split("\n")  # as a traceback ends
    assert max(map(len, lines)) <= 80
    assert lines[2:4] == [
        "    34.0 MiB  before the step",
        "    96.0 MiB  for the step's tensors (gradients among them: up to 3.0 MiB)",
    ]
    assert lines[-4:-2] == ["    80.0 MiB  0.0: addmm", "     8.0 MiB  11.1: gelu"]
    assert " ".join(lines[-2:]).startswith("Give a budget of at least 130.0 MiB, or policy='auto', which fits, or a")
    assert "\n" not in error.summary and " ".join(lines[:2]).endswith(error.summary)


def test_a_refusal_names_a_policy_that_would_suffice():
    _, least_bytes = captured(CASES["norms"])
    with pytest.raises(PlanInfeasible, match="policy='auto', which fits"):
        train(CASES["norms"], budget=least_bytes + 2 * MIB, policy="none")


def one_line(error):
    return " ".join(str(error).split())


def refusal_of(case, budget):
    with pytest.raises(PlanInfeasible) as refused:
        train(case, budget=budget, policy="auto")
    return refused.value


def test_a_refusal_states_what_counts_and_bytes_of_parameters_and_gradients():
    error, parameters = refusal_of(CASES["linear"], "0.01GiB"), CASES["linear"].make().parameters()
    nbytes = sum(parameter.nbytes for parameter in parameters)
    assert (error.uncounted_bytes, error.gradient_bytes) == (nbytes, nbytes)
    assert "into 0.010 GiB (growth of resident memory since enable, less code): it needs at least" in one_line(error)
    assert f"The parameters, {nbytes / 2**30:.3f} GiB, existed before and do not count" in one_line(error)


def test_a_batch_of_the_size_that_a_refusal_advises_fits():
    case, (_, least_bytes) = CASES["linear"], captured(CASES["linear"])
    budget = int(0.9 * least_bytes)
    percent = int(re.search(r"batch or image, of about (\d+) % of this one", one_line(refusal_of(case, budget)))[1])
    assert 30 < percent < 90
    rows = int(0.95 * percent / 100 * len(case.batch()))
    assert is_enabled(replace(case, batch=lambda: torch.randn(rows, 256)), budget)
    assert "a smaller batch or image cannot suffice" in one_line(refusal_of(case, "2MiB"))


def test_a_refusal_states_that_it_assumes_an_optimizer_only_where_none_exists():
    for make_optimizer, is_assumed in ((lambda _: None, True), (lambda p: torch.optim.SGD(p, momentum=0.9), False)):
        torch.compiler.reset()
        model = lmswap.enable(CASES["linear"].make(), "0.01GiB", min_swap_bytes=4096)
        optimizer = make_optimizer(model.parameters())
        with pytest.raises(PlanInfeasible) as refused:
            model(CASES["linear"].batch())
        assert dict(refused.value.parts)["reserved for optimizer state"] > 0
        assert ("No optimizer exists yet" in one_line(refused.value)) == is_assumed
        lmswap.disable(model)
        del optimizer


def test_the_report_names_kept_gradients_and_optimizer_state_with_their_bytes():
    torch.compiler.reset()
    case = CASES["linear"]
    model = lmswap.enable(case.make(), "1GiB", min_swap_bytes=4096)
    optimizer = torch.optim.AdamW(model.parameters())
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    accounts = []
    for _ in range(6):  # gradients are kept
        case.loss(model(case.batch())).backward()
        accounts.append(lmswap.report(model))
        optimizer.step()
    first, last = (dict(report.budget_parts) for report in (accounts[0], accounts[-1]))
    state_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    lmswap.disable(model)
    assert (first["gradients"], first["optimizer state"]) == (0, 0)
    assert abs(first["reserved for optimizer state"] - state_bytes) < 4096  # which has a counter for each parameter
    assert (last["gradients"], last["optimizer state"]) == (nbytes, state_bytes)
    assert last["reserved for optimizer state"] == 0
    for report in accounts:
        fixed_bytes = report.base_bytes + report.reserve_bytes + report.margin_bytes
        assert sum(nbytes for _, nbytes in report.budget_parts) == fixed_bytes


def test_state_that_existed_when_the_model_was_enabled_is_no_growth():
    torch.compiler.reset()
    case = CASES["linear"]
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters())
    case.loss(model(case.batch())).backward()
    optimizer.step()
    lmswap.enable(model, "1GiB", min_swap_bytes=4096)
    case.loss(model(case.batch())).backward()
    parts = dict(lmswap.report(model).budget_parts)
    lmswap.disable(model)
    assert parts["gradients"] == parts["optimizer state"] == parts["reserved for optimizer state"] == 0


@pytest.fixture
def files(tmp_path):
    """A step in a file, and the command that plans it."""
    program, _ = captured(CASES["linear"])
    (tmp_path / "machine.json").write_text(MACHINE.to_json())
    (tmp_path / "program.json").write_text(program.to_json())
    return ["plan", f"{tmp_path}/program.json", "--machine", f"{tmp_path}/machine.json", "--budget"]


def test_the_command_refuses_in_the_given_unit_with_the_same_parts(files, capsys):
    assert entry.main([*files, "0.02GiB"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert " into 0.020 GiB (growth of resident memory since enable, less code): it needs at least" in text
    assert "GiB reserved for optimizer state" in text and " MiB" not in text


def test_the_command_takes_the_least_share_that_works_with_a_note(files, capsys):
    assert entry.main([*files, "1%"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"budget '1%' is too small for this step: the least that works, [0-9.]+%, is taken, [0-9.]+", text)
