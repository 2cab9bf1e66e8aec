"""Warnings during training: steps over the budget, and models that are not managed."""

import gc
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lmswap
from lmswap.call_monitor import CALL_MONITOR
from lmswap.errors import BudgetExceeded, ManyTraces, NotManaged, PlanInfeasible
from lmswap.runtime.step_record import EndedStep, Peaks
from lmswap.session.allowance import Allowance, Held
from lmswap.session.budget_monitor import BudgetMonitor
from lmswap.session.plan_store import StepPlans
from lmswap.session.planned_step import PlannedStep
from tests.both_paths import PATHS, Net, batch, swapping
from tests.models import quick_of
from tests.training import session_of

MIB = 2**20
FORWARD, BACKWARD = (0, "forward"), (0, "backward")


def step(number, mib, sequence=(FORWARD, BACKWARD), follows=(0,)):
    return EndedStep(number, tuple(sequence), follows, Peaks(int(mib * MIB), 70 * MIB))


# Made with 20 MiB before the step, of which tensors held 15, and 5 in reserve; its tensors take 50.
PLANNED = SimpleNamespace(
    made_with=Allowance(100 * MIB, 20 * MIB, 15 * MIB, 5 * MIB, 24 * MIB),
    tensor_peak_bytes=50 * MIB,
    is_over_budget=False,
    backwards=(0,),
    adds_up=False,
)


class Model:
    """A model with a budget of 100 MiB; a step that follows anything follows `PLANNED`."""

    def __init__(self):
        self.budget = SimpleNamespace(nbytes=100 * MIB, counted="resident memory")
        self.retention = SimpleNamespace(is_short=False)
        context = SimpleNamespace(name="Net", budget=self.budget, retention=self.retention)
        plans = SimpleNamespace(get=lambda follows: PLANNED if follows else None)
        self.monitor = BudgetMonitor(context, plans)

    def report(self, ended, *, held=20, num_models=1, is_hooked=False, holds_gradients=False):
        self.budget.held, self.retention.is_short = Held(held * MIB, 30 * MIB, 2), holds_gradients
        self.monitor.report(ended, num_models=num_models, is_hooked=is_hooked)


def test_no_warning_for_a_step_within_the_budget():
    Model().report(step(1, 100))


def test_a_step_over_the_budget_warns_with_number_peak_and_excess():
    with pytest.warns(BudgetExceeded) as caught:
        Model().report(step(3, 133, follows=()))
    (warning,) = caught
    assert str(warning.message).startswith(
        "step 3 of Net held 133.00 MiB, 33.00 MiB more than its budget of 100.00 MiB (resident memory). Measured: 20.0"
        "0 MiB by tensors outside of the step when it began; 50.00 MiB by those that came since, the step's and the "
        "caller's; 63.00 MiB beside tensors. Wh"
    )
    assert "give a budget that is lower by that much" in str(warning.message)


def test_a_plan_over_the_budget_is_no_reason_to_lower_it(monkeypatch):
    monkeypatch.setattr(PLANNED, "is_over_budget", True)
    with pytest.warns(BudgetExceeded, match="none that takes less was found: give a larger budget, or a smaller batch"):
        Model().report(step(3, 133))


def test_the_warning_repeats_only_if_the_excess_grows_by_over_a_quarter():
    model = Model()
    with pytest.warns(BudgetExceeded, match="step 1"):
        model.report(step(1, 120))
    model.report(step(2, 120))
    model.report(step(3, 125))
    with pytest.warns(BudgetExceeded, match="step 4"):
        model.report(step(4, 126))
    model.report(step(5, 126))


def test_the_warning_names_what_held_the_memory_and_when_it_grew():
    with pytest.warns(BudgetExceeded) as caught:
        Model().report(step(3, 133), held=60)
    assert (
        "Measured: 60.00 MiB by tensors outside of the step when it began (planned: 20.00 MiB; 30.00 MiB came in or "
        "after step 2); 10.00 MiB by those that came since, the step's and the caller's (planned: 50.00 MiB); 63.00 "
        "MiB beside tensors (planned: 5.00 MiB and 24.00 MiB margin). Where"
    ) in str(caught[0].message)


def test_the_warning_repeats_each_time_that_memory_outside_has_grown():
    model = Model()
    for number, held in enumerate((20, 29, 38), 1):
        with pytest.warns(BudgetExceeded, match=f"step {number}"):
            model.report(step(number, 200 + held), held=held)
    model.report(step(4, 240), held=40)


def test_replanning_does_not_repeat_the_warning_for_a_similar_step():
    model = Model()
    model.monitor.mark_prepared(5)
    with pytest.warns(BudgetExceeded, match="step 4"):
        model.report(step(4, 120))
    model.report(step(5, 121))


@pytest.mark.parametrize(
    ("ended", "circumstances", "reason"),
    [
        (step(2, 120), {}, "graphs were captured"),
        (step(3, 120, [(1, "inference")], (1,)), {}, "no backward"),
        (step(3, 120, [FORWARD] * 4 + [BACKWARD] * 4), {}, "4 forwards ran before their backward"),
        (step(3, 120, [FORWARD] * 4), {}, "several forwards ran and no backward"),
        (step(3, 120, follows=()), {}, "planned apart"),
        (step(3, 120, follows=()), {"is_hooked": True}, "no step before it"),
        (step(3, 120), {"num_models": 2}, "several models are enabled"),
        (step(3, 120), {"holds_gradients": True}, "no room for a second set"),
        (step(3, 120), {}, r"margin\)\. Where"),
    ],
)
def test_special_steps_are_named_and_warned_of_separately(ended, circumstances, reason):
    model = Model()
    model.monitor.mark_prepared(2)
    with pytest.warns(BudgetExceeded, match="captured"):
        model.report(step(2, 119))
    if ended.number > 2:
        with pytest.warns(BudgetExceeded, match=reason):
            model.report(ended, **circumstances)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_over_its_budget_warns_when_its_backward_has_ended(path, monkeypatch, caplog):
    torch.compiler.reset()
    model = swapping(Net(), path)
    memory, budget_bytes = session_of(model).memory, lmswap.report(model).budget_bytes
    for _ in range(3):
        model(batch()).square().mean().backward()
    loss = model(batch()).square().mean()
    monkeypatch.setattr(memory, "lap_peaks", lambda **_: (budget_bytes + 3 * MIB, MIB))
    with (
        caplog.at_level(logging.WARNING),
        pytest.warns(BudgetExceeded, match=r"step 4 of Net held .* 3\.00 MiB more") as caught,
    ):
        loss.backward()
    assert caught[0].filename == __file__
    assert "step 4 of Net held" in caplog.text
    assert "OVER the budget by 3.00 MiB" in str(lmswap.report(model))
    monkeypatch.undo()
    lmswap.disable(model)


def test_an_excess_after_the_backward_is_warned_of_at_the_next_call(monkeypatch):
    torch.compiler.reset()
    model = swapping(Net(), "fx")
    budget_bytes = lmswap.report(model).budget_bytes
    for _ in range(3):
        model(batch()).square().mean().backward()
    monkeypatch.setattr(session_of(model).memory, "lap_peaks", lambda **_: (budget_bytes + MIB, MIB))
    with pytest.warns(BudgetExceeded, match="step 3 of Net") as caught:
        model(batch())
    assert caught[0].filename == __file__
    monkeypatch.undo()
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_forwards_over_the_budget_warn_without_a_backward(path, monkeypatch):
    torch.compiler.reset()
    model = swapping(Net(), path)
    memory, budget_bytes = session_of(model).memory, lmswap.report(model).budget_bytes
    for _ in range(2):
        model(batch()).square().mean().backward()
    outputs = [model(batch())]
    monkeypatch.setattr(memory, "lap_peaks", lambda **_: (budget_bytes + 3 * MIB, MIB))
    with pytest.warns(BudgetExceeded, match=r"3\.00 MiB more .*several forwards ran and no backward") as caught:
        outputs.append(model(batch()))
    assert caught[0].filename == __file__
    outputs.append(model(batch()))  # warned of once
    monkeypatch.undo()
    lmswap.disable(model)


@pytest.mark.slow
def test_all_that_kept_outputs_hold_counts_against_the_budget():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    lmswap.enable(model, budget="180MiB")
    with pytest.warns(BudgetExceeded, match="no backward"):
        kept = [model(torch.randn(4096, 256)) for _ in range(6)]  # of 64 MiB each
    assert len(kept) == 6
    lmswap.disable(model)


def test_capturing_planning_and_notes_are_logged(caplog):
    torch.compiler.reset()
    with caplog.at_level(logging.INFO, logger="lmswap"):
        model = swapping(Net(), "fx")
        model(batch()).square().mean().backward()
    assert "Net: captured graph 0, of " in caplog.text
    assert "planned the step of graphs 0, made in " in caplog.text
    assert "Net: budget 'auto' is " in caplog.text
    lmswap.disable(model)


class Inside(Net):
    def training_loss(self, x):
        return self.forward(x).square().mean()


def test_a_model_that_is_trained_but_never_called_is_warned_of_once():
    model = lmswap.enable(Inside())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch())  # validation is no training
    model.training_loss(batch()).backward()
    with pytest.warns(NotManaged, match=r"Inside itself was never called: .*Call model\(\.\.\.\) instead of") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    optimizer.step()
    lmswap.disable(model)


def test_a_model_used_only_through_its_compiled_module_is_warned_of():
    torch.compiler.reset()
    model = lmswap.enable(nn.Sequential(nn.Linear(4, 4)))  # of torch's own modules it takes the forward, not the call
    torch.compile(model, backend="aot_eager")(torch.randn(2, 4)).square().mean().backward()
    with pytest.warns(NotManaged, match=r"itself was never called: .* or of what torch\.compile has made of it"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_is_trained_through_its_forward_after_calls_is_warned_of_once(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).square().mean().backward()
        optimizer.step()
        lmswap.report(model)  # which ends the step
    model.forward(batch()).square().mean().backward()
    optimizer.step()  # as if it ran in two parts: it has new gradients only at the next time
    model.forward(batch()).square().mean().backward()
    with pytest.warns(NotManaged, match=r"not called since the optimizer step before: .* instead of model\.forward"):
        optimizer.step()
    model.forward(batch()).square().mean().backward()
    optimizer.step()
    lmswap.disable(model)


@pytest.mark.parametrize("path", PATHS)
def test_no_warning_for_optimizers_that_step_after_the_same_backward(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) is is_weight] for is_weight in (True, False))
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
    for _ in range(3):
        model(batch()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    lmswap.disable(model)


class Decaying(torch.optim.Adam):
    def step(self, closure=None):
        """Be seen by torch's hooks of steps twice: here, and in the class that it extends."""
        super().step(closure)


@pytest.mark.parametrize("path", PATHS)
def test_no_warning_for_an_optimizer_that_calls_the_step_of_its_base_class(path):
    torch.compiler.reset()
    model = swapping(Net(), path)
    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # whose step is seen from now on
    optimizer = Decaying(model.parameters())
    for _ in range(3):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    lmswap.disable(model)


class Unchanging(torch.optim.SGD):
    def step(self, closure=None):
        """Change no parameter, which the backward of an earlier forward may need."""


@pytest.mark.parametrize("path", PATHS)
def test_no_warning_where_a_forward_runs_before_the_optimizer_step_that_precedes_its_backward(path):
    torch.compiler.reset()
    model = lmswap.enable(Net(), compiler=path)
    optimizer = Unchanging(model.parameters())
    for loss in [model(batch()).square().mean() for _ in range(2)]:
        loss.backward()
        optimizer.step()
    lmswap.disable(model)


def test_no_warning_for_a_called_model_and_optimizers_of_others():
    torch.compiler.reset()
    model, other = lmswap.enable(Net()), nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # nothing to take a step by
    model(batch()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    lmswap.disable(model)


def test_a_disabled_model_is_not_looked_at_any_more():
    model = lmswap.enable(Net())
    lmswap.disable(model)
    assert model not in CALL_MONITOR._watched
    model(batch()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("path", PATHS)
def test_torch_func_transforms_run_the_model_in_eager_mode_and_warn_once(path):
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = torch.randn(64, 16)

    def loss(given):
        return torch.func.functional_call(model, given, (data,)).square().mean()

    def transformed():
        gradients = torch.func.grad(loss)(parameters)
        pushed = torch.func.jvp(model, (data,), (torch.ones_like(data),))
        jacobian = torch.func.jacrev(lambda x: torch.func.functional_call(model, parameters, (x,)))(data[0])
        return [*gradients.values(), torch.func.vmap(model)(data), *pushed, jacobian]

    expected = transformed()
    swapping(model, path)
    with pytest.warns(NotManaged, match=r"transform of torch\.func") as caught:
        actual = transformed()
    assert len(caught) == 1
    assert all(map(torch.equal, actual, expected))
    model(data).square().mean().backward()  # and a step is managed as ever
    assert lmswap.report(model).trains
    lmswap.disable(model)


def test_a_model_retraced_for_each_shape_is_warned_of_once():
    class Unrolled(nn.Module):
        """One op for each eight rows: a trace serves one number of them."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = self.first(x)
            for _ in range(x.shape[0] // 8):
                x = torch.tanh(x)
            return self.last(x)

    torch.compiler.reset()
    model = swapping(Unrolled(), "fx")

    def train(*counts):
        for count in counts:
            model(torch.randn(count, 64)).square().mean().backward()

    with torch.no_grad():
        model(torch.randn(3, 64))  # is no training
    train(16, 24, 32, 40, 40)
    with pytest.warns(
        ManyTraces, match=r"Unrolled has been trained with inputs of 5 different shapes.*drop_last=True"
    ) as caught:
        train(48, 56, 64)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    lmswap.disable(model)


def test_further_runs_of_one_graph_do_not_count_as_traces():
    torch.compiler.reset()
    model = swapping(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), "fx")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ManyTraces)
        for num_runs in range(1, 8):
            for _ in range(2):
                sum(model(torch.randn(8, 64)).square().mean() for _ in range(num_runs)).backward()
    assert len(session_of(model).graphs) > 5
    lmswap.disable(model)


class Deep(nn.Sequential):
    """Half of its step's peak is more than any plan of it needs, and less than `heavy_loss` takes."""

    def __init__(self):
        super().__init__(*(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.GELU())))


def light_loss(y):
    return y.square().mean()


def heavy_loss(y):
    return sum((y * k).sin().exp().square().mean() for k in range(1, 12))


def train_with(losses, *, held_bytes=0, save=None, **options):
    """Bits of a step for each of ``losses``, beside a tensor that is held from the third on; and the notes."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()  # the model before, and what it leaves for reuse, which counts against the budget
    torch.cuda.empty_cache()
    model, found = Deep(), []
    if options:
        lmswap.enable(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, loss in enumerate(losses, 1):
        value = loss(model(torch.randn(4096, 128)))
        value.backward()
        optimizer.step()
        held = torch.zeros(held_bytes if step >= 3 else 0, dtype=torch.uint8)  # noqa: F841
        # On the host: what is held on the device counts against the budget.
        found += [value.detach().clone().cpu(), *(parameter.grad.clone().cpu() for parameter in model.parameters())]
        optimizer.zero_grad()
        if save:
            lmswap.save_plan(model, save)
    notes = lmswap.report(model).plan_notes if options else ()
    lmswap.disable(model)
    return found, notes


def bytes_of_share(share):
    torch.compiler.reset()
    model = lmswap.enable(Deep(), share)
    light_loss(model(torch.randn(4096, 128))).backward()
    budget_bytes = lmswap.report(model).budget_bytes
    lmswap.disable(model)
    return budget_bytes


SQUEEZED = {
    "a loss that takes more than was assumed": {"losses": [heavy_loss] * 7},
    "a loss that takes less again": {"losses": [heavy_loss] * 4 + [light_loss] * 4},
    "a loss that takes more later": {"losses": [light_loss] * 4 + [heavy_loss] * 4},
    "tensors that are held beside it": {"losses": [light_loss] * 7, "held_bytes": 64 * MIB},
}


@pytest.mark.filterwarnings("ignore::lmswap.errors.BudgetExceeded")
@pytest.mark.parametrize("squeezed", quick_of(SQUEEZED, ["a loss that takes more than was assumed"]))
def test_a_step_for_which_no_plan_fits_any_more_follows_the_least(squeezed, tmp_path, device):
    case, file = SQUEEZED[squeezed], tmp_path / "plan.json"
    expected, _ = train_with(**case)
    # On a GPU, yielded gradients are in a segment of 20 MiB at least. A share would be widened for a loss.
    budget_bytes = bytes_of_share("50%" if device.type == "cpu" else "100%")
    actual, notes = train_with(**case, save=file, budget=budget_bytes)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    answers = "the plan stays as it was after step ", "no plan fits the budget, and this one takes the least"
    answered = [note for note in notes if any(answer in note for answer in answers)]
    # A larger loss after the first steps is growth on a GPU, whose allocator keeps its memory between steps.
    grows = "held_bytes" in case or (device.type == "cuda" and case["losses"][-1] is heavy_loss)
    assert len(answered) == (case["losses"][0] is heavy_loss or grows)  # noted once
    pinned, _ = train_with(**case, plan=file)
    assert all(torch.equal(a, b) for a, b in zip(pinned, expected, strict=True))


class Broken(nn.Module):
    """Two graphs in a step; only one where ``is_short``."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, is_short=False):
        x = self.first(x).tanh()
        if is_short:
            return x
        torch._dynamo.graph_break()
        return self.second(x).tanh()


@pytest.mark.parametrize(
    ("is_short", "said"),
    [
        (False, "graph 1 was found after graph 0 had been planned: it may have exceeded the budget once"),
        (True, "no plan of graph 1 fits the budget beside what was in use when it was found: it takes the least"),
    ],
)
def test_a_graph_for_which_no_plan_fits_is_reported_with_its_own_step(is_short, said, monkeypatch):
    torch.compiler.reset()
    make = StepPlans.make

    def refuse(plans, graphs, *given, **others):
        if graphs == (1,):
            raise PlanInfeasible(budget_bytes=1, needed_bytes=2, where="op 0", live=(), policy="swap_all")
        return make(plans, graphs, *given, **others)

    monkeypatch.setattr(StepPlans, "make", refuse)
    model = swapping(Broken(), "fx")
    for rows in (8, 16):  # where it is short, another graph for each
        model(torch.randn(rows, 64), is_short).sum().backward()
    assert [note for note in lmswap.report(model).plan_notes if "graph 1" in note] == [said]
    lmswap.disable(model)


def test_a_graph_that_cannot_fit_is_reported_before_it_runs(monkeypatch):
    torch.compiler.reset()
    make = StepPlans.make

    def refuse(plans, graphs, *given, **others):
        if graphs == (1,):
            raise PlanInfeasible(budget_bytes=2**20, needed_bytes=2**21, where="op 0", policy="auto")
        return make(plans, graphs, *given, **others)

    monkeypatch.setattr(StepPlans, "make", refuse)
    monkeypatch.setattr(PlannedStep, "is_over_budget", True)
    model = swapping(Broken(), "fx")
    model(torch.randn(8, 64), True).sum().backward()
    with pytest.warns(BudgetExceeded, match=r"needs at least 2\.0 MiB\. It runs by the plan that takes the least"):
        model(torch.randn(16, 64), True).sum().backward()
    lmswap.disable(model)
