"""Budgets are read as they are meant, or refused with what may have been meant."""

import logging
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import OptionError, PlanInfeasible, TierError
from lmswap.hardware import memory
from lmswap.ir.bytesize import format_bytes
from lmswap.options import Options
from tests.models import Broken
from tests.training import session_of

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "nbytes", "share"),
    [
        ("6GiB", 6 * GIB, None),
        (6 * GIB, 6 * GIB, None),
        (6e9, 6 * 10**9, None),
        (str(6 * GIB), 6 * GIB, None),
        ("auto", None, None),
        ("50%", None, 0.5),
        (" 12.5 %", None, 0.125),
        ("100%", None, 1.0),
        ("512KiB", 2**19, None),
    ],
)
def test_a_budget_is_bytes_or_a_share(budget, nbytes, share):
    options = Options.parse(budget)
    assert (options.budget_bytes, options.budget_share) == (nbytes, share)


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ("6", r"budget '6' is 6 B, less than any step takes; say the unit, as in \"6GiB\" or \"6%\""),
        (1, r"budget 1 is 1 B, .* \"1GiB\""),
        (6.5, "budget must be a whole number of bytes"),
        (float("nan"), "budget must be a whole number of bytes"),
        (True, "budget must be a whole number of bytes"),
        (None, r"budget must be a whole number of bytes or a string such as .*\"auto\", or a share, \"50%\", not None"),
        ("AUTO", r"budget 'AUTO' is not a byte count; .*\"auto\", or a share, \"50%\""),
        ("6G", r"budget '6G' is not a byte count; write \"6GB\" or \"6GiB\""),
        ("0%", "budget '0%' is not a share"),
        ("half%", "budget 'half%' is not a share"),
        ("half", "budget 'half' is not a byte count"),
        ("-1GiB", "budget must be more than 0 bytes"),
        ("0.5", "budget '0.5' is less than a byte; .*\"50%\""),
    ],
)
def test_invalid_budgets_are_refused_with_a_reason(budget, reason):
    with pytest.raises(OptionError, match=reason):
        Options.parse(budget)


def test_a_host_budget_has_the_same_words():
    assert Options.parse(host_budget="2GiB").host_budget_bytes == 2 * GIB
    with pytest.raises(OptionError, match=r"host_budget '2' is 2 B, .* \"2GiB\"$"):  # a share it cannot be
        Options.parse(host_budget="2")


def test_a_directory_may_be_a_path():
    assert Options.parse(disk_directory=Path("/var/tmp")).disk_directory == "/var/tmp"
    with pytest.raises(OptionError, match="disk_directory must be a path, not 3"):
        Options.parse(disk_directory=3)


@pytest.mark.parametrize("tier", ["host", "compressed", "peer:1"])
def test_a_directory_for_a_tier_without_files_is_refused(tier):
    with pytest.raises(OptionError, match=r"disk_directory has no effect with tier='(host|compressed|peer)'"):
        Options.parse(tier=tier, disk_directory="/var/tmp")
    for other in ("auto", "disk"):
        assert Options.parse(tier=other, disk_directory="/var/tmp").tier == other


def deep():
    """Whose step has 8 MiB for each of 24 layers."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.Tanh())))


def images():
    return torch.randn(2**14, 128)


@cache
def train(make, batch, budget, **options):
    """Losses and gradients of four steps, and the report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, found = lmswap.enable(make(), budget=budget, policy="swap", min_swap_bytes=4096, **options), []
    for _ in range(4):
        loss = model(batch()).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    report = lmswap.report(model)
    lmswap.disable(model)
    return found, report


def notes_of(report, word):
    return [note for note in report.notes if note.startswith(f"budget '{word}' is ")]


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of first steps
@pytest.mark.parametrize("compiler", ["fx", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_percentage_is_of_the_unplanned_tensors_and_is_kept(compiler):
    expected, plain = train(deep, images, "auto", compiler=compiler)
    found, report = train(deep, images, "50%", compiler=compiler)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert report.swapped_out_bytes > 0
    (note,) = notes_of(report, "50%")
    assert note.startswith(f"budget '50%' is {format_bytes(report.budget_bytes)}: 50 % of the ")
    budget_mib, tensor_mib, other_mib = map(float, re.findall(r"([\d.]+) MiB", note))
    assert budget_mib == pytest.approx(tensor_mib / 2 + other_mib, abs=0.02)
    assert "when it was planned" in note  # the report's sum is of what all else takes now
    assert report.measured_peak_bytes <= min(report.budget_bytes, 0.8 * plain.measured_peak_bytes)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of the first step
def test_a_share_grows_with_the_steps_that_become_known(caplog):
    """Graphs of a model that breaks are known one by one, and as one step afterwards."""
    with caplog.at_level(logging.INFO, logger="lmswap"):
        _, report = train(Broken, lambda: torch.randn(2**15, 128), "100%")
    assert caplog.text.count("budget '100%' is ") > 1
    (note,) = notes_of(report, "100%")
    assert note.startswith(f"budget '100%' is {format_bytes(report.budget_bytes)}")


def test_calls_without_a_backward_do_not_decide_a_share():
    torch.compiler.reset()
    model = lmswap.enable(deep(), budget="50%", policy="swap", min_swap_bytes=4096)
    with torch.no_grad():
        model(images())
    model(images())
    model(images()).square().mean().backward()
    report = lmswap.report(model)
    lmswap.disable(model)
    unplanned = [note.split(" that the step's")[0].split("50 % of the ")[1] for note in notes_of(report, "50%")]
    (expected,) = notes_of(train(deep, images, "50%")[1], "50%")
    assert f"50 % of the {unplanned[-1]} that" in expected
    assert report.swapped_out_bytes > 0


def test_a_percentage_above_the_device_is_capped_as_auto(monkeypatch):
    monkeypatch.setattr(memory.CpuMemory, "free_bytes", lambda _: 160 * 2**20)
    _, report = train(deep, images, "99%")
    (note,) = notes_of(report, "99%")
    assert "but no more than what was free when the model was enabled, less 10% for others" in note


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # of first steps
@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_a_small_percentage_is_refused_with_the_least_that_works(compiler):
    expected, _ = train(deep, images, "auto", compiler=compiler)
    found, report = train(deep, images, "1%", compiler=compiler)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert report.swapped_out_bytes > 0
    (note,) = (note for note in report.notes if "is too small for this step" in note)
    share = float(re.search(r"the least that works, ([0-9.]+)%, is taken", note).group(1))
    assert 10 < share < 50
    assert f", {format_bytes(report.budget_bytes)}; the most is needed at op " in note
    assert train(deep, images, f"{share + 3}%", compiler=compiler)[1].notes  # of other starts, a little more may be it


def test_a_percentage_that_needs_more_than_the_device_is_refused(monkeypatch):
    monkeypatch.setattr("lmswap.hardware.memory.CpuMemory.free_bytes", lambda memory: 0)
    with pytest.raises(PlanInfeasible, match="it needs at least"):
        train(deep, images, "2%")


@pytest.mark.parametrize("policy", ["auto", pytest.param("swap", marks=pytest.mark.slow)])
def test_least_budget_returns_a_sufficient_budget(policy):
    torch.compiler.reset()
    model = lmswap.enable(deep(), policy=policy)
    model(images())
    least_bytes = lmswap.least_budget(model)
    lmswap.disable(model)
    expected, plain = train(deep, images, "auto")
    found, report = train(deep, images, least_bytes + 2**24)  # what the process holds differs from start to start
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert report.swapped_out_bytes > 0
    assert report.measured_peak_bytes <= min(report.budget_bytes, 0.8 * plain.measured_peak_bytes)
    with pytest.raises(PlanInfeasible):
        train(deep, images, least_bytes - 2**25)


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")  # by the step that hooks record
@pytest.mark.parametrize("compiler", ["fx", "eager"])
def test_least_budget_of_a_refused_step_is_what_the_refusal_names(compiler):
    torch.compiler.reset()
    model = lmswap.enable(deep(), budget="1MiB", compiler=compiler)
    with pytest.raises(PlanInfeasible) as refused:
        for _ in range(2):
            model(images()).square().mean().backward()
    assert lmswap.least_budget(model) == refused.value.needed_bytes
    lmswap.disable(model)


def test_least_budget_is_that_of_the_step_that_ran_after_a_refused_one():
    torch.compiler.reset()
    model = lmswap.enable(deep(), budget="1GiB")
    model(images()).square().mean().backward()
    least_bytes = lmswap.least_budget(model)
    session_of(model).planning.refusal = PlanInfeasible(budget_bytes=1, needed_bytes=2**40, where="")
    assert lmswap.least_budget(model) == 2**40
    model(images()).square().mean().backward()
    assert lmswap.least_budget(model) < 2 * least_bytes
    lmswap.disable(model)


def test_least_budget_needs_a_planned_step():
    model = lmswap.enable(deep())
    with pytest.raises(OptionError, match="nothing is planned yet"):
        lmswap.least_budget(model)
    lmswap.disable(model)


@pytest.mark.parametrize(
    "options",
    [
        *({name: number} for name in ("budget", "host_budget", "min_swap_bytes") for number in (10**400, "9" * 400)),
        {"budget": "9" * 400 + "%"},
        {"link": "9" * 400 + "GB/s"},
        {"plan": "step\0.json"},
        {"plan": "a" * 5000},
        {"disk_directory": "a" * 5000},
        {"disk_directory": "a\0b"},
        {"disk_directory": "/tmp/caf\udce9"},
    ],
    ids=" ".join,
)
def test_numbers_and_paths_that_no_machine_has_are_refused_by_enable(options):
    with pytest.raises((OptionError, TierError)):
        lmswap.enable(nn.Linear(8, 8), **options)


def test_a_plan_cannot_be_saved_under_a_name_that_no_file_can_have(tmp_path):
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    model(torch.randn(8, 64)).sum().backward()
    for name in ("step\0.json", "a" * 5000):
        with pytest.raises(OptionError, match=r"cannot write plan '.*': (embedded null byte|File name too long)"):
            lmswap.save_plan(model, f"{tmp_path}/{name}")
    lmswap.disable(model)
