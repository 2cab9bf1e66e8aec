"""Verification mode: sound steps pass and stay as they are; missing waits and damaged bytes are detected."""

import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lmswap
from lmswap.capture.numerics.rounding_notes import ROUNDED_OTHERWISE
from lmswap.capture.numerics.tangents import TangentAdapter
from lmswap.errors import BytesChanged, PlainTorchDiffers, ResultDiffers, VerificationError
from lmswap.rewrite import insert
from lmswap.runtime import _C, rng
from lmswap.runtime.engine import SwapEngine
from lmswap.saved_tensors.saved_storage import SavedStorage
from lmswap.verify import against_eager
from lmswap.verify.against_unswapped import UnswappedReference
from lmswap.verify.bitwise import difference
from lmswap.verify.transfer_checksums import checksums
from tests.late_engine import Breakage, LateEngine
from tests.models import CASES, Broken, Case, quick_of
from tests.test_recompute import plan_at_random
from tests.training import loss_and_gradients, same_bits

SMALL = 4096
MODELS = {name: CASES[name] for name in ("resnet", "encoder", "shared_views")}
MODELS["broken"] = Case(Broken, lambda: torch.randn(64, 128))


pytestmark = pytest.mark.usefixtures("no_plans_from_the_cache")


def enable(case: Case, *, verify: bool = True, policy: str = "swap_all") -> nn.Module:
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(case.make(), policy=policy, min_swap_bytes=SMALL, verify=verify)


def step(case: Case, model: nn.Module) -> list[torch.Tensor]:
    return [*loss_and_gradients(model, case.loss(model(case.batch()))), torch.rand(3)]


@pytest.mark.parametrize("name", quick_of(MODELS, ["encoder", "shared_views"]))
def test_verified_steps_are_the_same_steps_and_all_of_them_is_counted(name):
    case, runs = MODELS[name], []
    for verify in (False, True):
        model = enable(case, verify=verify)
        runs.append([value for _ in range(3) for value in step(case, model)] + [*model.state_dict().values()])
        report = lmswap.report(model)
        lmswap.disable(model)
    assert same_bits(*runs)
    verified = report.verified
    num_parameters = len({id(p) for p in model.parameters()})
    assert verified.num_gradients >= 3 * num_parameters
    assert verified.num_outputs >= 3
    assert verified.num_plain_outputs >= 3
    assert bool(verified.not_beside_plain) == (name == "shared_views")
    if name != "shared_views":  # its outputs are views of what the graph gives, whose gradients plain torch never has
        assert verified.num_plain_gradients >= 3 * num_parameters
    assert verified.num_transfers == verified.num_poisoned > 0
    assert verified.transferred_bytes == verified.poisoned_bytes > 0
    assert verified.num_differences == 0
    assert verified.unrepeatable == []
    assert f"{verified.num_gradients} gradients compared bitwise" in " ".join(str(report).split())
    assert "The budget is not kept while verifying." in str(report)


@pytest.mark.parametrize("name", quick_of(["encoder", "shared_views", "broken"], ["shared_views"]))
def test_plans_that_swap_and_recompute_pass(name, monkeypatch):
    monkeypatch.setattr("lmswap.session.planner.make_plan", plan_at_random(0))
    model = enable(MODELS[name])
    for _ in range(2):
        step(MODELS[name], model)
    assert lmswap.report(model).verified.num_gradients > 0
    lmswap.disable(model)


@pytest.mark.slow
def test_other_ways_to_use_a_model_are_verified_too():
    case = MODELS["encoder"]
    model = enable(case)
    losses = [case.loss(model(case.batch())) for _ in range(2)]
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    del losses  # the second one never runs backward
    with torch.no_grad():
        model.eval()(case.batch())
    case.loss(model(case.batch())).backward()
    assert lmswap.report(model).verified.num_differences == 0
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)


def test_nothing_of_a_verified_call_is_kept_when_its_graph_is_gone(monkeypatch):
    made = []
    monkeypatch.setattr(
        "lmswap.session.compiled_graph.UnswappedReference",
        lambda *a, **k: made.append(UnswappedReference(*a, **k)) or made[-1],
    )
    runs = []

    class Run(against_eager._Run):
        def __init__(self, *given):
            super().__init__(*given)
            runs.append(weakref.ref(self))

    monkeypatch.setattr(against_eager, "_Run", Run)
    case = MODELS["shared_views"]
    model = enable(case)
    loss = case.loss(model(case.batch()))
    assert [len(reference._calls) for reference in made] == [1]
    del loss
    gc.collect()
    assert [len(reference._calls) for reference in made] == [0]
    step(case, model)
    assert [len(reference._calls) for reference in made] == [0]
    gc.collect()
    assert [run() for run in runs] == [None, None]
    lmswap.disable(model)


class Drops(nn.Module):
    def __init__(self, p: float = 0.15):
        super().__init__()
        self.first, self.second, self.p = nn.Linear(128, 128), nn.Linear(128, 128), p

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x).tanh(), self.p))


DROPS = Case(Drops, lambda: torch.randn(64, 128))


@pytest.mark.cpu_only("on a GPU eager torch runs the dropout that it traces")
def test_a_trace_unlike_plain_torch_is_detected(monkeypatch):
    monkeypatch.setattr("lmswap.capture.aot.no_python_kernels", nullcontext)  # torch then traces another dropout
    model = enable(DROPS, verify=False)
    step(DROPS, model)  # no error
    lmswap.disable(model)
    model = enable(DROPS)
    with pytest.raises(
        PlainTorchDiffers, match=r"output 0 is another one than plain torch gives: .* without, .* with lmswap"
    ):
        step(DROPS, model)
    lmswap.disable(model)


def twice(given):
    """Gradients of one part of a backward, doubled."""
    return {position: made if made is None else made * 2 for position, made in given.items()}


def test_gradients_that_differ_from_plain_torch_are_detected(monkeypatch):
    run = TangentAdapter.run
    monkeypatch.setattr(TangentAdapter, "run", lambda *given: map(twice, run(*given)))
    model = enable(DROPS)
    with pytest.raises(PlainTorchDiffers, match=r"the gradient of (first|second)\.(weight|bias) is another one"):
        step(DROPS, model)
    lmswap.disable(model)


class Scans(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x):
        return self.layer(x).sigmoid().cumprod(1)


def test_documented_rounding_differences_are_named_and_no_error(monkeypatch):
    run = TangentAdapter.run
    monkeypatch.setattr(TangentAdapter, "run", lambda *given: map(twice, run(*given)))
    case = Case(Scans, lambda: torch.rand(64, 128))
    model = enable(case)
    step(case, model)
    report = lmswap.report(model)
    assert any(note.startswith(ROUNDED_OTHERWISE) for note in report.notes)
    assert {"the gradient of layer.weight", "the gradient of layer.bias"} <= {*report.verified.rounded_otherwise}
    assert "rounded differently from plain torch, see the notes: the gradient of" in str(report.verified)
    lmswap.disable(model)


class Writes(nn.Module):
    """Writes its argument, a buffer and what was computed before it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(128, 128)
        self.register_buffer("total", torch.zeros(128))

    def forward(self, x, seen):
        seen.add_(1)
        self.total += x.detach().sum(0)
        x.mul_(2)
        return self.layer(x.tanh())


def test_writes_of_a_region_are_compared_with_plain_torch(monkeypatch):
    compared, compare = set(), against_eager.EagerReference._compare
    monkeypatch.setattr(
        against_eager.EagerReference,
        "_compare",
        lambda self, results, *rest: compared.update(r.name for r in results) or compare(self, results, *rest),
    )
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(Writes(), policy="swap_all", min_swap_bytes=SMALL, verify=True)
    before = nn.Linear(128, 128)
    for _ in range(2):
        x, seen = before(torch.randn(64, 128)), torch.zeros(3)
        model(x, seen).square().sum().backward()
        assert torch.equal(seen, torch.ones(3))
    verified = lmswap.report(model).verified
    assert (verified.num_differences, verified.unrepeatable) == (0, [])
    written = {f"input {name} (written in place)" for name in ("x", "seen", "total")}
    assert {*written, "output 0", "the gradient of x", "the gradient of layer.weight"} <= compared
    lmswap.disable(model)


BREAKAGES = {
    "a release that does not wait": Breakage(release_waits=False),
    "a copy in that does not wait for the copy out": Breakage(in_start_waits_for_out=False),
    "a first use that does not wait for the copy in": Breakage(in_done_waits=False),
    "blocks that overlap": Breakage(has_own_places=False),
}


follows_pointers = pytest.mark.cpu_only("the late engine follows device pointers on the host")


def with_engine(monkeypatch, breakage: Breakage) -> list[torch.Tensor]:
    """Lets models run on a late engine; what leaves is kept alive, as by an allocator that does not reuse it."""
    kept: list[torch.Tensor] = []
    out_start = SwapEngine.out_start
    monkeypatch.setattr(SwapEngine, "out_start", lambda self, x, *rest: kept.append(x) or out_start(self, x, *rest))
    monkeypatch.setattr("lmswap.session.engine_setup.open_engine", lambda *_: LateEngine(breakage))
    return kept


@follows_pointers
def test_a_sound_engine_that_is_always_late_passes(monkeypatch):
    case = MODELS["shared_views"]
    kept = with_engine(monkeypatch, Breakage())
    model = enable(case)
    for _ in range(2):
        step(case, model)
    assert kept
    assert lmswap.api._sessions[model].verified.num_transfers > 0
    lmswap.disable(model)


@follows_pointers
@pytest.mark.parametrize("name", BREAKAGES)
def test_only_verification_detects_a_broken_engine(name, monkeypatch):
    case = MODELS["shared_views"]
    with_engine(monkeypatch, BREAKAGES[name])
    model = enable(case, verify=False)
    step(case, model)  # no error
    lmswap.disable(model)
    model = enable(case)
    with pytest.raises(VerificationError):
        step(case, model)
    assert lmswap.api._sessions[model].verified.num_differences == 1
    lmswap.disable(model)


@follows_pointers
@pytest.mark.parametrize(
    ("damage", "where"), [("out", "on the way out"), ("away", "in the tier"), ("in", "on the way in")]
)
def test_a_flipped_bit_is_found_where_it_was_flipped(damage, where, monkeypatch):
    case = MODELS["shared_views"]
    with_engine(monkeypatch, Breakage(damage=damage))
    model = enable(case)
    with pytest.raises(
        BytesChanged, match=rf"buffer '[^']+', made by op .*, were changed {where}.*at byte 0"
    ) as caught:
        step(case, model)
    program = lmswap.program(model)
    maker = next(op for op in program.ops if program.buffer_names.index(caught.value.buffer) in op.writes)
    assert caught.value.made_by == f"op '{maker.name}' ({maker.target}, {maker.source})"
    assert "models.py:" in maker.source
    lmswap.disable(model)


def test_a_use_before_the_wait_for_a_swap_in_is_detected(monkeypatch):
    case = MODELS["shared_views"]

    def wait_at_the_end(editor, swap, anchor):
        flat = editor._incoming[swap.buffer]
        first_use(editor, swap, anchor)
        (done,) = [user for user in flat.users if user.target is insert.ops.swap_in_wait]
        done.replace_all_uses_with(flat, delete_user_cb=lambda user: user is not done)
        editor.graph.output.prepend(done)

    def start_and_wait(engine, *arguments):
        flat = in_start(engine, *arguments)
        while not all(map(engine.native.is_finished, engine._arriving.values())):
            pass
        return flat

    first_use, in_start = insert._Editor._first_use, SwapEngine.in_start
    sound = enable(case, verify=False)
    expected = step(case, sound)
    lmswap.disable(sound)
    monkeypatch.setattr(insert._Editor, "_first_use", wait_at_the_end)
    monkeypatch.setattr(SwapEngine, "in_start", start_and_wait)  # a link so fast that there are no stalls
    model = enable(case, verify=False)
    assert same_bits(step(case, model), expected)
    lmswap.disable(model)
    model = enable(case)
    with pytest.raises(ResultDiffers, match="gradient of"):
        step(case, model)
    lmswap.disable(model)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.second(torch.dropout(torch.tanh(self.first(x)), 0.5, True).exp())


def test_a_wrong_gradient_names_its_op_line_and_recomputed_tensors(monkeypatch):
    case = Case(Dropped, lambda: torch.randn(64, 64))
    planner = plan_at_random(0, share=1.0)
    monkeypatch.setattr("lmswap.session.planner.make_plan", planner)
    unseeded = lambda state, device, op, /, *a, **k: op(*a, **k)  # noqa: E731
    monkeypatch.setattr(rng.recompute_random, "__code__", unseeded.__code__)
    model = enable(case)
    with pytest.raises(ResultDiffers) as caught:
        for _ in range(3):
            step(case, model)
    error = caught.value
    assert error.result in ("the gradient of first.weight", "the gradient of second.weight")
    assert "aten.mm" in error.made_by
    assert "test_verification.py:" in error.made_by
    assert "self.second(torch.dropout(" in error.made_by
    assert 0 < error.num_differing <= error.num_elements == 64 * 64
    assert error.step == 1
    assert error.moved
    assert "without" in str(error)
    lmswap.disable(model)


@pytest.mark.parametrize("name", ["resnet", "encoder", "broken"])
def test_all_swapped_tensors_of_hooks_are_compared(name):
    case, runs = MODELS[name], []
    for verify in (False, True):
        torch.manual_seed(0)
        model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL, verify=verify, compiler="eager")
        runs.append([value for _ in range(3) for value in step(case, model)])
        report = lmswap.report(model)
        lmswap.disable(model)
    assert same_bits(*runs)
    assert 2 * report.verified.num_saved >= report.verified.num_transfers > 0  # out and in
    assert report.verified.num_differences == 0


@pytest.mark.cpu_only("torch's CUDA allocator rounds what is kept, and gives back what the run before it held")
def test_copies_for_the_comparison_are_not_part_of_the_planned_step():
    forward = []
    for verify in (False, True):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        lmswap.enable(model, policy="swap_all", verify=verify, compiler="eager")
        model(torch.randn(2**14, 64)).sum().backward()  # 4 MiB each
        model(torch.randn(2**14, 64)).sum().backward()
        planned = lmswap.api._sessions[model].plans.newest()
        forward.append(planned.costs.scratch_bytes[: planned.joined.program.segments[0].stop])
        lmswap.disable(model)
    assert forward[0] == forward[1]


@pytest.mark.parametrize("moment", ["the recorded step", "a planned step"])
def test_hooks_detect_a_wrong_view_of_right_bytes(moment, monkeypatch):
    case = MODELS["encoder"]
    torch.manual_seed(0)
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL, verify=True, compiler="eager")
    if moment == "a planned step":
        step(case, model)
    fetch = SavedStorage.fetch
    # Every byte arrives, but of the place where it belongs nothing is known.
    monkeypatch.setattr(SavedStorage, "fetch", lambda self: fetch(self).view(torch.uint8).flatten().roll(4))
    message = r"saved tensor unpacked by \w+Backward0.*made by module .*models\.py:\d+"
    with pytest.raises(ResultDiffers, match=message) as caught:
        step(case, model)
    assert caught.value.step == (1 if moment == "the recorded step" else 2)
    assert lmswap.api._sessions[model].verified.num_differences == 1
    monkeypatch.undo()
    step(case, model)
    lmswap.disable(model)


@torch.library.custom_op("lmswap_test::shaky", mutates_args=())
def shaky(x: torch.Tensor) -> torch.Tensor:
    return x + next(NOISE)


shaky.register_fake(torch.empty_like)
shaky.register_autograd(lambda context, gradient: gradient)
NOISE = itertools.count()


class Shaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return shaky(h.exp()), h.sin().cos()


@pytest.mark.parametrize("steady", [0, 15])
def test_results_that_torch_does_not_repeat_are_excluded_and_listed(monkeypatch, steady):
    monkeypatch.setattr(f"{__name__}.NOISE", itertools.chain([0] * steady, itertools.count()))
    case = Case(Shaky, lambda: torch.randn(64, 64))
    model = enable(case)
    for _ in range(12):
        step(case, model)
    verified = lmswap.report(model).verified
    assert verified.num_differences == 0
    assert verified.unrepeatable == [
        "output 0, made by op 'shaky' (lmswap_test.shaky.default)",
        "output 0 of plain torch",
    ]
    assert "not compared" in " ".join(str(lmswap.report(model)).split())
    assert verified.num_outputs in range(12, 24)
    lmswap.disable(model)


@pytest.mark.cpu_only("an engine of the host driver, which follows pointers on the host")
@pytest.mark.parametrize("nbytes", [1, 7, 8, 2**20 - 1, 2**20, 2**20 + 9, 3 * 2**20])
def test_both_ends_sum_alike_and_see_every_bit_and_every_exchange(nbytes, tmp_path):
    engine = _C.Engine(driver="host", audits=True)
    engine.open_disk_tier(str(tmp_path), 2**23)
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    token = torch.from_dlpack(engine.out_start(1, "disk", 0, flat.data_ptr(), nbytes, 0))
    engine.out_done(int(token), 0)
    sums = checksums(flat)
    assert engine.take_checksums(engine.out_transfer(int(token))) == sums.tolist()
    for place in {0, nbytes // 2, nbytes - 1}:
        changed = flat.clone()
        changed[place] ^= 128
        assert not torch.equal(checksums(changed), sums)
    if nbytes >= 32:
        exchanged = flat.clone()
        exchanged[:8], exchanged[8:16] = flat[8:16], flat[:8]
        assert not torch.equal(checksums(exchanged), sums)
    del token
    engine.close()


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return shaky(torch.tanh(self.linear(x)).exp())


def test_a_difference_by_nan_mentions_reads_of_uninitialized_memory(monkeypatch):
    monkeypatch.setattr(f"{__name__}.NOISE", itertools.repeat(0.0))
    model = enable(Case(Uninitialized, lambda: torch.randn(64, 64)))
    model(torch.randn(64, 64))
    found = itertools.chain([0.0, float("nan")], itertools.repeat(0.0))  # what memory holds without swaps, with, later
    monkeypatch.setattr(f"{__name__}.NOISE", found)
    with pytest.raises(ResultDiffers, match="holds NaN, and then these are not lmswap's bytes"):
        model(torch.randn(64, 64))
    lmswap.disable(model)


def test_results_are_compared_by_their_bits():
    nan = torch.tensor([float("nan"), 1.0])
    assert difference(nan, nan.clone()) is None
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert difference(None, None) is None
    assert difference(torch.zeros(2), None) is not None
    assert difference(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) is not None
    assert difference(torch.zeros(0), torch.zeros(0)) is None
    found = difference(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 7.0]]))
    assert (found.num_differing, found.num_elements) == (2, 6)
    assert found.first == "first at [1, 1]: 0.0 without, 5.0 with"
    assert not found.is_nan
    assert difference(nan, torch.ones(2)).is_nan
