"""A budget means the same to `lmswap.enable`, `lmswap.least_budget` and `lmswap plan`, and refusals itemize it."""

import json

import pytest
import torch
from torch import nn

import lmswap
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.cli import entry
from lmswap.cli.plan import plan_within
from lmswap.errors import PlanInfeasible
from lmswap.hardware import memory
from tests.models import Case
from tests.reporting.small_step import MACHINE
from tests.session.training import bytes_of_the_heap, train

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
    with pytest.MonkeyPatch.context() as patched:  # or starts of a process differ by some MiB
        patched.setattr(memory, "resident_bytes", bytes_of_the_heap)
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
    least = [
        budget for budget in range(least_bytes - 8 * MIB, least_bytes + 8 * MIB, MIB) if is_planned(program, budget)
    ]
    assert abs(least[0] - least_bytes) <= MIB
    assert is_enabled(CASES[name], max(least[0], least_bytes) + MIB)
    assert not is_enabled(CASES[name], min(least[0], least_bytes) - 2 * MIB)


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
    error, text = refused.value, str(refused.value)
    assert [what for what, _ in error.parts][:3] == ["before the step", "reserve", "margin"]
    assert sum(nbytes for _, nbytes in error.parts) == error.needed_bytes
    assert f" {unit}: it needs at least " in text and f" {unit} for the step's tensors, at op " in text
    assert (" MiB" in text) == (unit == "MiB")


def test_a_refused_share_states_which_would_suffice(monkeypatch):
    monkeypatch.setattr(memory.CpuMemory, "free_bytes", lambda _: 0)
    with pytest.raises(PlanInfeasible, match=r"into 2% \(.* MiB\): it needs at least [0-9.]+% \([0-9.]+ MiB\) = "):
        train(CASES["norms"], budget="2%", policy="auto")


def test_a_refusal_names_a_policy_that_would_suffice():
    _, least_bytes = captured(CASES["norms"])
    with pytest.raises(PlanInfeasible, match="policy='auto', which fits"):
        train(CASES["norms"], budget=least_bytes + 2 * MIB, policy="none")
