"""Optimizer state that does not fit streams through device memory, and results are those of plain torch."""

import copy
import functools
import gc
import re
import warnings

import pytest
import torch
from torch import nn

import lmswap
from lmswap.analyze.memory import StepMemory
from lmswap.errors import NotManaged, OptionError, PlanInfeasible, TierError, TransferError
from lmswap.hardware.measure import describe_machine
from lmswap.runtime import _C
from lmswap.session.plan_file import PinnedPlans
from lmswap.torch_compat.tensors import storage_id
from lmswap.training_state.weights import Weights
from tests.training import session_of

WIDTH, LAYERS = 128, 6

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, amsgrad=True),
    "adam fused": lambda groups: torch.optim.Adam(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd foreach": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "adagrad fused": lambda groups: torch.optim.Adagrad(groups, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "muon": lambda groups: torch.optim.Muon([p for group in groups for p in group["params"] if p.ndim == 2]),
}


class Network(nn.Module):
    """Layers of 64 KiB, biases, and a parameter that no step uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        )
        self.unused = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return self.layers(x).square().mean()


def groups_of(model):
    """Two groups, the first with weight decay, of weights and biases in turns."""
    weights = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": weights[:3] + others, "weight_decay": 0.01}, {"params": weights[3:]}]


def made(name="adamw"):
    torch.manual_seed(0)
    model = Network()
    optimizer = OPTIMIZERS[name](groups_of(model))
    return model, optimizer


def streaming(model, optimizer, **options):
    """Enable ``model``, with a state that streams in chunks of a few layers."""
    lmswap.enable(model, "1GiB", optimizer=optimizer, **({"min_swap_bytes": 1024} | options))
    session_of(model).updates.of_each[0]._max_chunk_bytes = 5 * WIDTH * WIDTH * 4
    return stream_all(model)


def stream_all(model):
    updates = session_of(model).updates
    updates.stream_state(updates.state_bytes)
    return updates.of_each[0]


def loss_of(model, number):
    torch.manual_seed(number)
    return model(torch.randn(4, WIDTH))


def train(model, optimizer, steps=4, *, first=0, between=lambda step: None, loss_of=loss_of):
    seen = []
    for step in range(first, first + steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
        seen.append(loss.detach())
    return seen


def all_tensors(model, optimizer):
    """The model's and the optimizer's, in order."""
    state = optimizer.state_dict()["state"]
    held = [value for key in sorted(state) for value in state[key].values() if isinstance(value, torch.Tensor)]
    return [*model.parameters(), *held]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def non_resident(model, optimizer):
    find = session_of(model).engine.host_copies.find
    held = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [value for value in held if find(value.untyped_storage()) is not None]


def large():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.Tanh())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_large(model, optimizer):
    seen = []
    for step in range(6):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *model.parameters()]


def too_small(by_mib=18):
    """A budget for the large network without most of its state, which takes 32 MiB."""
    model, _ = large()
    for _ in range(2):  # a process grows most when it first traces
        lmswap.enable(model, "2GiB")
        model(torch.randn(8, 512)).square().mean().backward()
        budget_bytes = lmswap.least_budget(model) - by_mib * 2**20
        lmswap.disable(model)
    return budget_bytes


def test_state_that_does_not_fit_streams(no_garbage):
    expected = train_large(*large())
    budget_bytes = too_small()
    model, optimizer = large()
    lmswap.enable(model, budget_bytes, optimizer=optimizer, weights="keep")
    assert same(train_large(model, optimizer), expected)
    report = lmswap.report(model)
    assert report.highest_peak_bytes <= budget_bytes
    assert 0 < len(non_resident(model, optimizer)) <= 32
    state_bytes = sum(tensor.nbytes for tensor in non_resident(model, optimizer))
    assert report.state_in_bytes == report.state_out_bytes == state_bytes
    assert "are non-resident between updates; each copies them" in str(report).replace("\n", " ")


def test_the_first_update_streams_though_its_closure_makes_the_plan(no_garbage):
    budget_bytes = too_small()
    model, optimizer = large()
    lmswap.enable(model, budget_bytes, optimizer=optimizer, weights="keep")

    def closure():
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert non_resident(model, optimizer)
    lmswap.disable(model)


def test_a_step_that_was_kept_before_state_streams_streams_it():
    """As Accelerate keeps it where gradients are scaled, and assigns it again."""
    plain, plain_optimizer = made()
    expected = train(plain, plain_optimizer)
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep", min_swap_bytes=1024)
    kept = optimizer.step
    stream_all(model)
    optimizer.step = kept
    assert same(train(model, optimizer), expected)
    assert len(non_resident(model, optimizer)) >= 2 * LAYERS
    lmswap.disable(model)
    assert same(train(model, optimizer), train(plain, plain_optimizer))


def test_state_of_parameters_that_are_added_later_can_stream_too():
    """Also once gradients do, as in gradual unfreezing."""

    def trained(enable):
        model, _ = made()
        model.layers[:6].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.layers[6:].parameters(), lr=1e-2)
        if enable:
            streaming(model, optimizer, weights="swap")
            session_of(model).updates.gradients.stream()
        seen = train(model, optimizer, 2)
        model.layers[:6].requires_grad_(True)
        optimizer.add_param_group({"params": [*model.layers[:6].parameters()]})
        loss = loss_of(model, 2)
        if enable:
            session = session_of(model)
            step, updates = session.current_step(), session.updates
            assert len(non_resident(model, optimizer)) == LAYERS
            assert session.streaming.stream_more(step.merged.program, step.costs)
            assert updates.state_bytes >= updates.streamed_bytes > 0.75 * updates.state_bytes
        loss.backward()
        optimizer.step()
        if enable:
            assert len(non_resident(model, optimizer)) > LAYERS
        return [*seen, loss.detach(), *all_tensors(model, optimizer)]

    assert same(trained(enable=True), trained(enable=False))


def test_state_that_the_tier_cannot_hold_is_refused_before_a_step_runs(no_garbage):
    # On a GPU an update of all parameters at once, which the budget does not need, takes 16 MiB of temporaries.
    budget_bytes = too_small(by_mib=36)
    model, optimizer = large()
    lmswap.enable(model, budget_bytes, optimizer=optimizer, host_budget="4MiB")
    with pytest.raises(PlanInfeasible):
        model(torch.randn(8, 512))


@pytest.mark.cpu_only("growth of a process")
def test_a_least_budget_is_that_with_which_state_and_gradients_stream(resident):
    expected = train_large(*large())
    model, optimizer = large()
    lmswap.enable(model, "2GiB", optimizer=optimizer, weights="swap")
    model(torch.randn(8, 512))
    least_bytes = lmswap.least_budget(model)
    lmswap.disable(model)
    model, optimizer = large()
    lmswap.enable(model, "20MiB", optimizer=optimizer, weights="swap")
    with pytest.raises(PlanInfeasible, match=r"cannot fit this step into 20\.0 MiB") as refusal:
        model(torch.randn(8, 512))
    lmswap.disable(model)
    assert refusal.value.needed_bytes <= least_bytes < 80 * 2**20  # while all is resident, 90 and 98 MiB
    model, optimizer = large()
    lmswap.enable(model, refusal.value.needed_bytes, optimizer=optimizer, weights="swap")
    assert same(train_large(model, optimizer), expected)
    assert session_of(model).updates.gradients.are_streamed
    assert len(non_resident(model, optimizer)) == 32
    lmswap.disable(model)


@pytest.mark.cpu_only("in an arena the step's memory stays its own")
@pytest.mark.usefixtures("resident", "unmoved_margin")
def test_an_update_takes_memory_that_the_step_has_given_back():
    def least_bytes(streams):
        model, optimizer = large()
        lmswap.enable(model, "2GiB", optimizer=optimizer, weights="keep", policy="none")
        if streams:
            stream_all(model)
        model(torch.randn(1024, 512)).square().mean()
        step, planner = session_of(model).current_step(), session_of(model).planner
        found = planner.least_bytes(step.merged.program, step.costs, step.allowance.at_start())
        if streams:  # so do plans of `lmswap plan`
            assert lmswap.program(model).scratch_bytes[-1] == session_of(model).updates.window_bytes()
        lmswap.disable(model)
        return found - step.allowance.base_bytes

    assert least_bytes(streams=False) - least_bytes(streams=True) >= 32 * 2**20  # all of the state


@pytest.mark.parametrize("streams_gradients", [False, True])
def test_plans_of_steps_whose_state_streams_are_cached_and_saved(streams_gradients, tmp_path):
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep", policy="swap_all", min_swap_bytes=1024)
    stream_all(model)
    if streams_gradients:
        session_of(model).updates.gradients.stream()
    train(model, optimizer, steps=1)
    session = session_of(model)
    step = session.current_step()
    assert session.plans.load_cached(step.merged.program).plan == step.plan
    lmswap.save_plan(model, tmp_path / "plan.json")
    ((_, saved),) = PinnedPlans.read(str(tmp_path / "plan.json")).steps
    assert saved.plan.acts_as(step.plan)
    lmswap.disable(model)


@pytest.mark.parametrize("streams_gradients", [False, True])
def test_a_saved_plan_is_followed_with_the_state_that_streamed(streams_gradients, tmp_path):
    expected, streamed = train(*made()), []
    for given in ({"budget": "1GiB", "weights": "keep", "min_swap_bytes": 1024}, {"plan": tmp_path / "plan.json"}):
        torch.compiler.reset()
        model, optimizer = made()
        lmswap.enable(model, optimizer=optimizer, **given)
        session = session_of(model)
        if "plan" not in given:
            session.updates.stream_state(session.updates.state_bytes // 2)
            if streams_gradients:
                session.updates.gradients.stream()
        assert same(train(model, optimizer), expected)
        streamed.append(session.updates.streamed_bytes / session.updates.state_bytes)
        assert session.updates.gradients.are_streamed is streams_gradients
        lmswap.save_plan(model, tmp_path / "plan.json")
        origin = lmswap.report(model).plan_origin
        lmswap.disable(model)
    assert "plan.json" in origin
    assert 0.5 <= streamed[0] == streamed[1] < 0.8


def test_steps_of_other_sizes_leave_room_for_the_update_too():
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep", policy="none", min_swap_bytes=1024)
    stream_all(model)
    for batch in (8, 7, 6, 5):  # the last one runs by the plan of the one before
        model(torch.randn(batch, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = session_of(model).plans.newest(), session_of(model).current_step()
    larger, smaller = (StepMemory(step.merged.program, step.costs).peak.nbytes for step in steps)
    assert smaller < larger < steps[0].plan.predicted_peak_bytes
    assert steps[1].plan.predicted_peak_bytes >= steps[1].allowance.update_bytes > 0
    lmswap.disable(model)


def test_state_that_fits_stays_as_it_is():
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer)
    train(model, optimizer)
    assert not non_resident(model, optimizer)
    assert not session_of(model).updates.of_each[0]._needs_chunks()
    lmswap.disable(model)
    assert "step" not in vars(optimizer)


def test_errors_while_enabling_are_undone(monkeypatch):
    def fail(*_):
        raise TierError("no room")

    model, optimizer = made()
    monkeypatch.setattr(Weights, "manage", fail)
    with pytest.raises(TierError):
        lmswap.enable(model, "1GiB", optimizer=optimizer, weights="swap")
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_have_plain_bits(name):
    plain, plain_optimizer = made(name)
    expected = train(plain, plain_optimizer)
    model, optimizer = made(name)
    streaming(model, optimizer)
    assert same(train(model, optimizer), expected)
    assert same(all_tensors(model, optimizer), all_tensors(plain, plain_optimizer))
    if name != "adafactor":  # whose state is small
        assert len(non_resident(model, optimizer)) >= LAYERS
    lmswap.disable(model)
    assert same(train(model, optimizer), train(plain, plain_optimizer))


@pytest.mark.parametrize("schedules_first", [False, True])
def test_schedules_clipping_and_accumulation(schedules_first):
    def run(model, optimizer, enable):
        if schedules_first:
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
            enable()
        else:
            enable()
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        with warnings.catch_warnings(action="error"):  # of schedules that no step came before them
            for step in range(8):
                torch.manual_seed(step)
                model(torch.randn(4, WIDTH)).backward()
                if step % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step == 5)
                    schedule.step()
        return all_tensors(model, optimizer)

    plain, model = made(), made()
    expected = run(*plain, lambda: None)
    assert same(run(*model, lambda: streaming(*model)), expected)


def test_a_closure_is_called_once_and_hooks_see_one_step():
    def run(model, optimizer):
        calls = []
        optimizer.register_step_pre_hook(
            lambda o, *_: calls.append(("pre", [len(g["params"]) for g in o.param_groups]))
        )
        optimizer.register_step_post_hook(
            lambda o, *_: calls.append(("post", [len(g["params"]) for g in o.param_groups]))
        )

        def closure():
            calls.append("closure")
            optimizer.zero_grad()
            loss = model(torch.ones(4, WIDTH))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        return calls, [*losses, *all_tensors(model, optimizer)]

    plain, model = made(), made()
    streaming(*model)
    (calls, found), (expected_calls, expected) = run(*model), run(*plain)
    assert calls == expected_calls
    assert same(found, expected)


def test_state_is_saved_and_loaded_while_it_streams():
    plain, plain_optimizer = made()
    train(plain, plain_optimizer)
    saved = copy.deepcopy(plain_optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    expected = train(plain, plain_optimizer, first=4)
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    optimizer.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    assert len(non_resident(model, optimizer)) >= 2 * LAYERS
    assert same(train(model, optimizer, first=4), expected)
    held = optimizer.state_dict()
    loaded_model, loaded = made()
    loaded_model.load_state_dict(model.state_dict())
    loaded.load_state_dict(held)
    lmswap.disable(model)
    assert same(train(loaded_model, loaded, first=8), train(plain, plain_optimizer, first=8))


def test_state_can_be_read_and_written_between_steps():
    def between(optimizer):
        def act(step):
            for values in list(optimizer.state.values())[:3]:
                values["exp_avg"].mul_(0.5)
                values["exp_avg_sq"].data[0] = float(values["exp_avg"].sum()) ** 2

        return act

    plain, plain_optimizer = made()
    expected = train(plain, plain_optimizer, between=between(plain_optimizer))
    model, optimizer = made()
    streaming(model, optimizer)
    assert same(train(model, optimizer, between=between(optimizer)), expected)


@pytest.mark.cpu_only("numpy cannot hold a GPU's memory")
def test_state_that_numpy_holds_stays_where_it_is():
    plain, plain_optimizer = made()
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer, min_swap_bytes=1024)
    train(model, optimizer, 1)
    train(plain, plain_optimizer, 1)
    array = optimizer.state[model.layers[0].weight]["exp_avg"].numpy()
    stream_all(model)
    assert same(train(model, optimizer, 3, first=1), train(plain, plain_optimizer, 3, first=1))
    assert torch.equal(torch.from_numpy(array), plain_optimizer.state[plain.layers[0].weight]["exp_avg"])


def test_an_update_that_is_interrupted_leaves_all_in_its_place(monkeypatch):
    model, optimizer = made()
    state = streaming(model, optimizer)
    train(model, optimizer, 2)
    before = len(non_resident(model, optimizer))
    addcdiv, calls = torch.Tensor.addcdiv_, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return addcdiv(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "addcdiv_", failing)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["foreach"] = False
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer, 1, first=2)
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert len(non_resident(model, optimizer)) == before
    assert not state._fetched


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.LBFGS,
        pytest.param(torch.optim.SparseAdam, marks=pytest.mark.cpu_only("the emulated GPU does not sort")),
    ],
)
def test_optimizers_that_need_more_than_gradients_stay_resident(kind):
    def run(enable):
        torch.manual_seed(0)
        model = nn.Embedding(64, WIDTH, sparse=kind is torch.optim.SparseAdam)
        optimizer = kind(model.parameters(), lr=0.1)
        if enable:
            with pytest.warns(NotManaged, match=r"what it updates, stay resident: small copies .* could not be"):
                lmswap.enable(model, "1GiB", optimizer=optimizer)

        def closure():
            optimizer.zero_grad()
            losses = [model(torch.arange(first, first + 9)).square().mean() for first in (0, 6)]
            for loss in losses:
                loss.backward()
            return sum(losses)

        losses = [optimizer.step(closure).detach() for _ in range(3)]
        return model, [*losses, *all_tensors(model, optimizer)]

    model, found = run(enable=True)
    assert same(found, run(enable=False)[1])
    assert any("stay resident" in note for note in lmswap.report(model).notes)


def test_what_is_no_optimizer_of_the_model_is_refused():
    model, _ = made()
    with pytest.raises(OptionError, match=r"takes a torch\.optim\.Optimizer, or several, not str"):
        lmswap.enable(model, "1GiB", optimizer="adam")
    with pytest.raises(OptionError, match="trains no parameter of Network"):
        lmswap.enable(model, "1GiB", optimizer=torch.optim.Adam(nn.Linear(2, 2).parameters()))


@pytest.mark.cpu_only("updates of a GPU's model may run on the CPU")
def test_a_device_of_updates_is_refused_on_a_cpu():
    model, optimizer = made()
    with pytest.raises(OptionError, match="is for a model on a GPU; here updates run on the CPU: leave it out"):
        lmswap.enable(model, "1GiB", optimizer=optimizer, optimizer_device="cpu")
    with pytest.raises(OptionError, match=r"must be 'cpu', or left out .*, not 'disk'"):
        lmswap.enable(model, "1GiB", optimizer=optimizer, optimizer_device="disk")
    assert "step" not in vars(optimizer)


class OfAll(torch.optim.Optimizer):
    """An update by the norm of all gradients, once it exceeds a thousand."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters])) if parameters else 1
        for parameter in parameters:
            parameter.sub_(parameter.grad * min(1.0, 1000.0 / float(norm)))


class OfEach(torch.optim.Optimizer):
    """A momentum of signs."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * mean.lerp(parameter.grad, 0.1).sign_())
                mean.lerp_(parameter.grad, 1 - group["beta"])


class OfAbsent(OfEach):
    """Weight decay also of parameters without gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.mul_(0.99)
        super().step()


class OfChance(OfEach):
    """Noise for each parameter in turn."""

    @torch.no_grad()
    def step(self, closure=None):
        noises = [torch.randn(()) for group in self.param_groups for _ in group["params"]]
        super().step()
        for noise, parameter in zip(noises, (p for group in self.param_groups for p in group["params"]), strict=True):
            parameter.add_(noise * torch.rand(()))


@pytest.mark.parametrize("kind", [OfEach, OfAbsent])
def test_an_update_of_another_package_streams_if_it_is_of_each_parameter(kind):
    OPTIMIZERS["of each"] = kind
    try:
        test_updates_have_plain_bits("of each")
    finally:
        del OPTIMIZERS["of each"]


@pytest.mark.parametrize("kind", [OfAll, OfChance])
def test_an_update_of_all_parameters_stays_whole_and_trying_it_changes_nothing(kind):
    model, _ = made()
    optimizer, before = kind(model.parameters()), [p.clone() for p in model.parameters()]
    seed = torch.get_rng_state()
    with pytest.warns(NotManaged, match=f"{kind.__name__}: its state, .* had other bits"):
        lmswap.enable(model, "1GiB", optimizer=optimizer)
    assert same([*model.parameters()], before)
    assert torch.equal(torch.get_rng_state(), seed)
    assert not optimizer.state


@pytest.mark.cpu_only("faults of a disk")
@pytest.mark.parametrize("faults", ["read@20=fail", "write@45=fail", "write@41=fail,read@0.5=jitter:0.01"])
def test_a_copy_that_fails_loses_nothing(faults, monkeypatch):
    """Each parameter and its state are those before the update, or those after it."""
    describe_machine(torch.device("cpu"), "disk")  # measured while the disk is sound
    engine = functools.partial(_C.Engine, faults=faults)
    monkeypatch.setattr("lmswap.session.engine_setup._C.Engine", engine)
    plain, plain_optimizer = made()
    model, optimizer = made()
    streaming(model, optimizer)
    for step in range(4):
        before = [tensor.clone() for tensor in all_tensors(plain, plain_optimizer)]
        train(plain, plain_optimizer, 1, first=step)
        try:
            train(model, optimizer, 1, first=step)
        except TransferError as error:
            assert re.search(r"(read|write) of 0.1 MiB \(65536 bytes\)", str(error))
            break
    else:
        pytest.fail("nothing failed")
    groups = [len(group["params"]) for group in optimizer.param_groups]
    assert groups == [len(group["params"]) for group in plain_optimizer.param_groups]
    after = all_tensors(plain, plain_optimizer)
    for tensor, old, new in zip(all_tensors(model, optimizer), before, after, strict=True):
        assert torch.equal(tensor, old) or torch.equal(tensor, new)
    optimizer.zero_grad()
    train(model, optimizer, 2, first=9)  # what is left goes on


def test_gradient_scaling_skips_updates():
    def run(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(5):
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, WIDTH)) * (float("inf") if step == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [torch.tensor(scaler.get_scale()), *all_tensors(model, optimizer)]

    plain, model = made(), made()
    streaming(*model)
    assert same(run(*model), run(*plain))


def test_a_copy_of_an_optimizer_runs_by_itself():
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, 2, first=2)
    assert same(train(copied_model, copied, 2, first=2), expected)


def test_an_optimizer_outlives_its_model():
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    (held,) = (values["exp_avg"] for p, values in optimizer.state.items() if p is model.layers[0].weight)
    expected = held.clone()
    model.layers[0].weight.grad = torch.zeros_like(model.layers[0].weight)
    del model
    gc.collect()
    assert torch.equal(held, expected)
    optimizer.step()
    assert torch.equal(held, expected.lerp(torch.zeros_like(expected), 1 - 0.9))


def test_an_optimizer_belongs_to_one_enabled_model():
    model, optimizer = made()
    streaming(model, optimizer)
    with pytest.raises(OptionError, match="another enabled model has it"):
        lmswap.enable(nn.ParameterList([model.unused]), "1GiB", optimizer=optimizer)


@pytest.mark.parametrize("share", [0.5, 1])
def test_each_part_of_an_update_has_state_to_copy(share):
    """Or nothing would run beside the copies of the one before it."""
    model, optimizer = made()
    state = streaming(model, optimizer, min_swap_bytes=32 * 1024)
    state._max_chunk_bytes = int(share * 2 * WIDTH * WIDTH * 4)  # of the state of one layer
    model(torch.randn(4, WIDTH)).backward()
    parts = []
    state._update(lambda: parts.append([p for group in optimizer.param_groups for p in group["params"]]))
    assert len(parts) >= LAYERS // 2
    assert all(any(parameter.ndim == 2 for parameter in part) for part in parts)
    assert sorted(id(p) for part in parts for p in part) == sorted(id(p) for p in model.parameters())


class Uneven(nn.ModuleList):
    """Small and large layers beside each other."""

    def __init__(self):
        wide = (3 if number % 7 > 3 else 1 for number in range(28))
        super().__init__(nn.Linear(WIDTH, width * WIDTH, bias=False) for width in wide)

    def forward(self, x):
        return sum(layer(x).square().mean() for layer in self)


def test_an_update_fetches_as_far_ahead_as_its_window_has_room():
    """Or the link waits for the larger one of two copies whenever parts differ in size."""
    model = Uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    lmswap.enable(model, "1GiB", optimizer=optimizer, weights="keep", min_swap_bytes=1024)
    state = stream_all(model)
    state._max_chunk_bytes = 1
    model(torch.randn(4, WIDTH)).backward()
    optimizer.step()
    sizes, seen = [each.nbytes for each in model.parameters()], []

    def run():
        """List the parts whose momentum is in device memory, or on its way."""
        momenta = [optimizer.state[each]["momentum_buffer"].untyped_storage() for each in model.parameters()]
        seen.append([part for part, momentum in enumerate(momenta) if storage_id(momentum) in state._fetched])

    state._update(run)
    window_bytes = max(map(sum, zip(sizes, sizes[1:], sizes[2:], strict=False)))
    for part, held in enumerate(seen):
        following = held[-1] + 1
        assert held == [*range(max(0, part - 1), following)]
        assert sum(sizes[held[0] : following]) <= window_bytes
        assert following == len(sizes) or sum(sizes[held[0] : following + 1]) > window_bytes
    lmswap.disable(model)


def test_an_update_without_gradients_changes_nothing():
    model, optimizer = made()
    streaming(model, optimizer)
    train(model, optimizer, 2)
    before = [each.clone() for each in all_tensors(model, optimizer)]
    optimizer.zero_grad()
    optimizer.step()
    assert same(all_tensors(model, optimizer), before)


@pytest.mark.cpu_only("of a process")
def test_a_process_may_free_more_than_a_model_takes():
    before = b"\1" * 2**28
    model, optimizer = made()
    lmswap.enable(model, "1GiB", optimizer=optimizer, min_swap_bytes=1024)
    train(model, optimizer, 1)
    del before
    model(torch.randn(6, WIDTH)).backward()
    assert not any("path:" in note for note in lmswap.report(model).notes)
