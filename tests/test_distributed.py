"""Processes that train together have the bits that they have without lmswap: DistributedDataParallel and FSDP2.

Processes are started once and run all cases, each with a process group of its own: over gloo on CPUs, over NCCL on
GPUs, of which the emulated ones come with an NCCL that is emulated too. A case trains twice in the same processes,
without lmswap and with it; every rank compares for itself.
"""

import contextlib
import json
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import lmswap
from lmswap import api
from lmswap.errors import BudgetExceeded, OptionError, RankMissing
from lmswap.hardware import measure
from lmswap.ir import backward_parts
from lmswap.ir.machine import Link, Machine, Rate, Tier
from lmswap.planner import calibrate, make_plan
from lmswap.session import planner
from lmswap.session.plan_store import StepPlans
from tests.processes import end, give_back_memory, start, take_gpu, take_violations
from tools.emulated_gpu import machine

pytestmark = pytest.mark.timeout(3600)  # the first test waits for the processes of all
over_gloo = pytest.mark.cpu_only("by what gloo says, or by made-up measurements of CPUs")

_TIMEOUT = timedelta(seconds=300)  # of a collective: a busy machine is no deadlock
_WIDTH = 64


class Net(nn.Module):
    """Layers of which ``aside`` is not always called."""

    def __init__(self, depth=3, *, norm=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))
        self.norm = norm(_WIDTH) if norm else nn.Identity()
        self.aside, self.head = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, x, *, is_aside=True):
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        return self.head(torch.tanh(self.aside(x)) if is_aside else x)


class Frozen(Net):
    """Of which only the head is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)


class Untraced(Frozen):
    """Which torch is not to trace."""

    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


class Deep(nn.Module):
    """Whose step takes 24 tensors of 8 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 4)])

    def forward(self, x):
        first, last = self.layers
        x = first(x)
        for _ in range(23):
            x = torch.sin(x)
        return last(x)


def batch():
    return torch.randn(256, _WIDTH)


def plainly(model, steps=4, *, batch=batch, **kwargs):
    """Losses and gradients of some steps with an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = model(batch(), **kwargs).square().mean()
        loss.backward()
        yield from (loss.detach().clone(), *gradients(model))
        optimizer.step()
        optimizer.zero_grad()


def accumulating(model):
    """The gradients of three batches are summed before they are reduced."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        is_last = step % 3 == 2
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(batch()).square().mean()
            loss.backward()
        yield from (loss.detach().clone(), *gradients(model))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


def branching(model):
    """The branch is taken in every other step."""
    for step in range(4):
        yield from plainly(model, steps=1, is_aside=step % 2 == 0)


def uneven(model):
    """The first rank has more batches than the others, and goes on with their last state."""
    with model.join():
        yield from plainly(model, steps=4 if dist.get_rank() == 0 else 2)


def compressed(model):
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    yield from plainly(model)


def of_low_rank(model):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield from plainly(model)


def deeply(model):
    yield from plainly(model, steps=3, batch=lambda: torch.randn(2**16, 32))


def of_other_lengths(model):
    """Each rank draws lengths of its own, the longest of which needs swaps."""
    lengths = [2**13, 2**15, 3 * 2**12, 2**16, 5 * 2**13, 7 * 2**13]
    for at in range(len(lengths)):
        yield from plainly(model, steps=1, batch=partial(torch.randn, lengths[at - dist.get_rank()], 32))


def scaled(model):
    """In fp16 with a loss scale so large that some first steps are left out, those of all ranks."""
    device_type = next(model.parameters()).device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device_type, init_scale=2.0**40, growth_interval=2)
    scales = []
    for _ in range(8):
        x = torch.randn(2**16, 32)
        with torch.autocast(device_type, torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        yield from (loss.detach().clone(), *map(torch.nan_to_num, gradients(model)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert sorted(scales) != scales, "no step was left out"
    yield torch.tensor(scales)


def holding_more(model):
    """Something else comes into use beside the steps, on one rank more than on the other, so that they plan again."""
    held = []
    for _ in range(7):
        yield from plainly(model, steps=1, batch=lambda: torch.randn(2**16, 32))
        held.append(torch.zeros(2**20 * (2 + 2 * dist.get_rank())))


def gradients(model):
    """Copies of them; graphs give zeros where torch itself gives no gradient."""
    found = [p.grad if isinstance(p.grad, torch.Tensor) else torch.zeros(()) for p in model.parameters()]
    found = [whole(gradient) for gradient in found]
    return [gradient if gradient.any() else torch.zeros(()) for gradient in found]


def whole(tensor):
    """A copy of what all ranks together have of it."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def wrapped(network, ddp):
    return DDP(network, **ddp)


def sharded(network, options):
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


@dataclass(frozen=True)
class Case:
    """A model, how processes share it and how it is trained."""

    name: str
    world: int = 2
    make: Callable = Net
    train: Callable = plainly
    share: Callable = wrapped
    options: dict = field(default_factory=dict)  # of ``share``
    enable: dict = field(default_factory=dict)
    budgets: tuple = ()  # by rank
    where: str = "before"  # enabled before it is wrapped, "after" it, or "inside" of the wrapper
    is_slow: bool = False  # left to `make test-all`


def _both(name, **how):
    """Enabled before it is wrapped, and after it."""
    return [Case(f"{name}, {where}", where=where, is_slow=where == "after", **how) for where in ("before", "after")]


_UNUSED, _STATIC, _VIEWS = {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}
_TIGHT = {"make": Deep, "train": deeply, "budgets": ("150MiB", "150MiB")}
CASES = [
    *(Case(f"enabled {where}", where=where, is_slow=where != "before") for where in ("before", "after", "inside")),
    *_both("no_sync", train=accumulating),
    *(replace(case, is_slow=True) for case in _both("a branch not taken", train=branching, options=_UNUSED)),
    *(replace(case, is_slow=True) for case in _both("static graph", options=_STATIC)),
    *(replace(case, is_slow=True) for case in _both("uneven inputs", train=uneven)),
    Case("a bucket for each layer", options={"bucket_cap_mb": 0.01}, is_slow=True),
    Case("gradients are views of buckets, no_sync", train=accumulating, options=_VIEWS, is_slow=True),
    Case("compressed to fp16", train=compressed, is_slow=True),
    Case("PowerSGD", train=of_low_rank, is_slow=True),
    # Not synchronized: torch's SyncBatchNorm refuses tensors on CPUs.
    Case("batch norm", make=lambda: Net(norm=nn.BatchNorm1d), is_slow=True),
    Case("hooks", enable={"compiler": "eager"}),
    Case("a swapped frozen base", make=Frozen, enable={"weights": "swap"}),
    Case("a swapped frozen base, hooks", make=Untraced, enable={"weights": "swap"}, is_slow=True),
    Case("half of the memory, auto", enable={"policy": "auto"}, **_TIGHT),
    Case("half of the memory, recompute", enable={"policy": "recompute"}, is_slow=True, **_TIGHT),
    Case(
        "other lengths, half of the memory",
        enable={"policy": "auto"},
        is_slow=True,
        **{**_TIGHT, "train": of_other_lengths},
    ),
    Case("more and more is held beside", make=Deep, train=holding_more, budgets=("200MiB", "200MiB"), is_slow=True),
    Case(
        "loss scaling in fp16",
        make=Deep,
        train=scaled,
        budgets=("150MiB", "150MiB"),
        enable={"policy": "auto"},
        is_slow=True,
    ),
    Case("other plans", enable={"policy": "swap"}, is_slow=True, **{**_TIGHT, "budgets": ("150MiB", "250MiB")}),
    *_both("fully_shard", share=sharded),
    Case(
        "fully_shard, resharded",
        share=sharded,
        options={"reshard_after_forward": True},
        enable={"compiler": "eager"},
        is_slow=True,
    ),
    *(
        Case(
            f"fully_shard, half of the memory, {policy}",
            share=sharded,
            enable={"policy": policy},
            is_slow=True,
            **_TIGHT,
        )
        for policy in ("auto", "swap", "swap_all")
    ),
    Case("four processes", world=4, is_slow=True),
    Case("four processes, PowerSGD", world=4, train=of_low_rank, is_slow=True),
]


def params(cases):
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.is_slow) for case in cases]


def run(case, *, is_enabled):
    """What the rank trained, and what was moved meanwhile."""
    torch.compiler.reset()
    torch.manual_seed(0)
    network = case.make()
    enable = {"policy": "swap_all", "budget": "1GiB", "min_swap_bytes": 1024, **case.enable}
    if case.budgets:
        enable["budget"] = case.budgets[dist.get_rank()]
    if is_enabled and case.where == "before":
        lmswap.enable(network, **enable)
    model = case.share(network, case.options)
    managed = model if case.where == "after" else network
    if is_enabled and case.where != "before":
        lmswap.enable(managed, **enable)
    torch.manual_seed(dist.get_rank())  # ranks have other data
    found = [*case.train(model), *map(whole, model.state_dict().values())]
    if not is_enabled:
        return found, {}
    report = lmswap.report(managed)
    reported = {
        "swapped_bytes": report.tier_highest_bytes,
        "recomputed_bytes": report.recomputed_bytes,
        "peak_bytes": report.highest_peak_bytes,
        "budget_bytes": report.budget_bytes,
        "left_bytes": report.tier_used_bytes - api._session(managed).engine.host_copies.nbytes,
        "swapped_weights": [*swapped_weights(managed)],
        "notes": [*report.notes],
        "plan": report.plan_origin,
    }
    lmswap.disable(managed)
    return found, reported


def swapped_weights(network):
    """The names of what is in its host copy."""
    find = api._session(network).engine.host_copies.find
    for name, parameter in network.named_parameters():
        if type(parameter) is nn.Parameter and find(parameter.untyped_storage()) is not None:
            yield name


def outcome(case):
    """What one rank saw in the case."""
    expected, _ = run(case, is_enabled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual, reported = run(case, is_enabled=True)
    differing = [at for at, pair in enumerate(zip(actual, expected, strict=True)) if not torch.equal(*pair)]
    exceeded = [str(warning.message) for warning in caught if issubclass(warning.category, BudgetExceeded)]
    return {"compared": len(actual), "differing": differing, "exceeded": exceeded, **reported}


def run_cases(rank, world, folder, names, device):
    """Runs the cases of ``world`` processes as one of them; an error in one is reported, and the next begins."""
    torch.set_num_threads(1)
    if device == "cuda":
        take_gpu(rank, world)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    backward_parts._MIN_BYTES = 1  # gradients of these small models, too, are yielded one by one
    for number, case in enumerate(CASES):
        if case.world != world or case.name not in names:
            continue
        store = dist.FileStore(f"{folder}/store-{number}", world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
        give_back_memory()
        started = time.perf_counter()
        try:
            seen = outcome(case)
        except Exception:
            seen = {"error": traceback.format_exc()}
        dist.destroy_process_group()
        seen["seconds"] = time.perf_counter() - started
        seen["violations"] = take_violations()
        Path(f"{folder}/{case.name}-{rank}.json").write_text(json.dumps(seen))


def too_large(device):
    """Of these numbers of processes, those for which there are not enough GPUs; emulated ones are as many as wanted."""
    has_enough = device == "cpu" or machine.is_built()
    return set() if has_enough else {case.world for case in CASES if case.world > torch.cuda.device_count()}


@pytest.fixture(autouse=True)
def has_enough_gpus(request, device):
    world = request.node.callspec.params["case"].world if "case" in request.fixturenames else 2
    if world in too_large(device.type):
        pytest.skip(f"{world} processes want as many GPUs, and here are {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What every rank saw, by case; processes of one world run all cases of it that tests ask for."""
    folder = tmp_path_factory.mktemp("ranks")
    asked = {case.name for case in CASES for item in request.session.items if f"[{case.name}]" in item.name}
    names, device = {*asked, "other plans"}, request.config.getoption("--device")
    for world in sorted({case.world for case in CASES if case.name in names} - too_large(device)):
        end(start(run_cases, world, str(folder), names, device), seconds=120 * len(names))

    def of(case):
        files = [folder / f"{case.name}-{rank}.json" for rank in range(case.world)]
        return [json.loads(file.read_text()) if file.exists() else {"error": "it hung or died"} for file in files]

    return {case.name: of(case) for case in CASES}


@pytest.mark.parametrize("case", params(CASES))
def test_every_rank_has_the_bits_that_it_has_without_lmswap(seen, case):
    for rank in seen[case.name]:
        assert "error" not in rank, rank["error"]
        assert rank["violations"] == []
        assert rank["compared"] > 10
        assert rank["differing"] == []
        assert rank["exceeded"] == []
        assert rank["left_bytes"] == 0
        moved_bytes = (rank["recomputed_bytes"] or 0) + rank["swapped_bytes"]
        assert moved_bytes > 0


@pytest.mark.parametrize("case", params(case for case in CASES if "weights" in case.enable))
def test_every_rank_swaps_what_is_frozen_and_keeps_what_is_trained(seen, case):
    for rank in seen[case.name]:
        assert set(rank["swapped_weights"]) == {
            f"{name}.weight" for name in ("layers.0", "layers.1", "layers.2", "aside")
        }


@pytest.mark.parametrize("case", params(case for case in CASES if case.budgets))
def test_every_rank_keeps_its_budget(seen, case):
    for rank in seen[case.name]:
        assert 0 < rank["peak_bytes"] <= rank["budget_bytes"]


@pytest.mark.parametrize("case", params(case for case in CASES if case.train is holding_more))
def test_ranks_that_hold_more_between_steps_replan_during_training(seen, case):
    for rank in seen[case.name]:
        assert "replanned" in rank["plan"]


def test_ranks_that_plan_differently_train_together(seen):
    one, other = seen["other plans"]
    assert one["swapped_bytes"] > other["swapped_bytes"] > 0


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@over_gloo
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("where", ["before", "after"])
def test_sharded_parameters_are_not_swapped_and_the_error_says_so(where):
    network, options = Net(), {"budget": "1GiB", "weights": "swap", "min_swap_bytes": 1024}
    if where == "before":
        lmswap.enable(network, **options)
    sharded(network, {})
    with pytest.raises(OptionError, match=r"fully_shard has sharded the parameters of (FSDP)?Net, and gathers"):
        network(batch()) if where == "before" else lmswap.enable(network, **options)
    lmswap.disable(network)
    network(batch()).sum().backward()  # as without lmswap
    assert all(parameter.grad is not None for parameter in network.parameters())


def die_within(rank, world, folder, compiler):
    """The last rank dies in the third backward; the others write down what they see."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    network, swapped = Net(), Path(folder) / f"swapped-{rank}"
    swapped.mkdir()
    lmswap.enable(
        network, compiler=compiler, policy="swap_all", budget="1GiB", min_swap_bytes=1024, disk_directory=str(swapped)
    )
    model = DDP(network)
    reported = {"steps": 0, "error": ""}

    def dies(_):
        if reported["steps"] == 2 and rank == world - 1:
            os._exit(7)

    network.head.weight.register_hook(dies)
    try:
        while reported["steps"] < 5:
            model(batch()).square().mean().backward()
            reported["steps"] += 1
    except RuntimeError as error:
        reported["error"] = str(error)
    reported["left_bytes"] = lmswap.report(network).tier_used_bytes
    lmswap.disable(network)
    reported["files"] = [str(file) for file in swapped.iterdir()]
    reported["open"] = [file for file in open_files() if str(swapped) in file]
    Path(f"{folder}/{rank}.json").write_text(json.dumps(reported))
    os._exit(0)  # the process group has lost a member


def open_files():
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield str(descriptor.readlink())


@over_gloo
@pytest.mark.parametrize("compiler", ["fx", pytest.param("eager", marks=pytest.mark.slow)])
def test_when_a_rank_dies_in_mid_step_the_others_raise_and_clean_up(tmp_path, compiler):
    assert end(start(die_within, 2, str(tmp_path), compiler), seconds=400) == [0, 7]
    reported = json.loads((tmp_path / "0.json").read_text())
    assert reported["steps"] == 2
    assert "peer" in reported["error"]
    assert reported["files"] == reported["open"] == []
    assert reported["left_bytes"] == 0


def started_by_torchrun(rank, world, folder, seconds=300):
    """Makes this process one of ``world`` on this machine; what is measured of it is made up, and slower by rank."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LMSWAP_CACHE_DIR="")
    link = Link(Rate.constant(1e9 / (rank + 1)), Rate.constant(1e9))
    machine = Machine(f"made up {rank}", 2**34, 1e11, 1e10, 1e-5, (Tier("disk", 2**34 - rank, link),))
    measure._measure_machine = lambda *_: machine
    measure.measure_link = lambda *_: link
    store = dist.FileStore(f"{folder}/store", world)
    store.set_timeout(timedelta(seconds=seconds))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)


def plan_together(rank, world, folder):
    """Trains under the same budget on all ranks, then under another on each; writes down by which plans."""
    started_by_torchrun(rank, world, folder)
    reported = []
    for budgets in (("150MiB",) * world, ("150MiB", "250MiB")):
        torch.compiler.reset()
        torch.manual_seed(0)
        network = Deep()
        lmswap.enable(network, budget=budgets[rank], policy="swap", compiler="fx")
        model = DDP(network)
        losses = [*plainly(model, steps=1, batch=lambda: torch.randn(2**16, 32))]
        (session,) = api.sessions()
        step = session.current_step()
        reported.append(
            {
                "origin": step.origin,
                "plan": step.plan.to_json(),
                "machine": replace(session.plans._machine.now, tiers=()).to_json(),
                "link": repr(session.plans._machine.now.tier("disk").link),
                "notes": [*lmswap.report(network).notes],
                "finite": all(tensor.isfinite().all().item() for tensor in losses),
            }
        )
        lmswap.disable(network)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(reported))
    dist.destroy_process_group()


@over_gloo
@pytest.mark.slow
def test_local_ranks_with_equal_budgets_share_measurements_and_plan(tmp_path):
    assert end(start(plan_together, 2, str(tmp_path)), seconds=600) == [0, 0]
    (one, one_apart), (other, other_apart) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert one["plan"] == other["plan"]
    assert sorted(["made by another rank of this machine", "made in"]) == sorted(
        reported["origin"] if reported["origin"].startswith("made by") else reported["origin"][:7]
        for reported in (one, other)
    )
    assert (one["machine"], one["link"]) == (other["machine"], other["link"])
    assert one["link"] == repr(Link(Rate.constant(1e9 / 2), Rate.constant(1e9)))  # the slower rank's
    assert any("2 ranks of this machine swap at once" in note for note in one["notes"])
    assert one_apart["plan"] != other_apart["plan"]
    assert all(reported["origin"].startswith("made in") for reported in (one_apart, other_apart))
    assert all(reported["finite"] for reported in (one, other, one_apart, other_apart))


def plan_again(rank, world, folder, ranks_that_learn):
    """Trains until plans are final; what is planned after the first steps, on ranks that find cause to, swaps all."""
    started_by_torchrun(rank, world, folder)
    calibrate.TOLERANCE = -1.0 if rank in ranks_that_learn else 1e6
    made, tells, steps = [], [], []

    def large_batch():
        steps.append(len(steps))
        return torch.randn(2**16, 32)

    def swapping_more(policy, *args, **kwargs):
        made.append(len(steps))
        return make_plan(policy if len(steps) == 1 else "swap_all", *args, **kwargs)

    def telling(plans, *args):
        tells.append(len(steps))
        return publish_replan(plans, *args)

    planner.make_plan = swapping_more
    publish_replan, StepPlans.publish_replan = StepPlans.publish_replan, telling
    torch.manual_seed(0)
    network = Deep()
    lmswap.enable(network, budget="250MiB", policy="swap", compiler="fx")
    losses = [*plainly(DDP(network), steps=6, batch=large_batch)]
    (session,) = api.sessions()
    step = session.current_step()
    reported = {
        "origin": step.origin,
        "notes": [*session.plan_notes],
        "first": made.count(1),
        "tells": len(tells),
        "plan": step.plan.to_json(),
        "finite": all(tensor.isfinite().all().item() for tensor in losses),
        "left_bytes": lmswap.report(network).tier_used_bytes,
    }
    lmswap.disable(network)
    Path(f"{folder}/{rank}.json").write_text(json.dumps(reported))
    dist.destroy_process_group()


@over_gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks_that_learn",
    [pytest.param((0, 1), id="all find cause"), pytest.param((1,), id="one finds cause")],
)
def test_replans_of_one_local_rank_are_followed_by_the_others(tmp_path, ranks_that_learn):
    assert end(start(plan_again, 2, str(tmp_path), ranks_that_learn), seconds=600) == [0, 0]
    reported = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert reported[0]["plan"] == reported[1]["plan"]
    assert sum(rank["first"] for rank in reported) == 1  # each by the first that came to it
    assert sum(rank["tells"] for rank in reported) == 1
    replanned = [rank["notes"][-1].split(": ", 1) for rank in reported]
    assert [rank["origin"] for rank in reported] == [origin for origin, _ in replanned]
    assert all(re.fullmatch("replanned after step [34]", origin) for origin, _ in replanned)
    assert sum("made by another rank of this machine" in why for _, why in replanned) == 1
    assert all(rank["finite"] and rank["left_bytes"] == 0 for rank in reported)


def enable_alone(rank, world, folder):
    """The first rank enables a model that the second does not have, together with it and then by itself."""
    started_by_torchrun(rank, world, folder, seconds=2)
    if rank == 0:
        try:
            lmswap.enable(Net(), budget="1GiB")
        except RankMissing as error:
            Path(f"{folder}/error").write_text(str(error))
        lmswap.enable(Net(), budget="1GiB", together=False)
        Path(f"{folder}/done").touch()
    while not Path(f"{folder}/done").exists():
        time.sleep(0.1)
    os._exit(0)


@over_gloo
@pytest.mark.slow
def test_a_rank_that_enables_a_model_alone_is_refused_with_advice(tmp_path):
    assert end(start(enable_alone, 2, str(tmp_path)), seconds=400) == [0, 0]
    assert "rank 0 of this machine has waited 2 s for rank 1" in (tmp_path / "error").read_text()
