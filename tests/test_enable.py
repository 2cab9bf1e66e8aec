"""lmswap.enable end to end on the CPU, with the disk tier."""

import copy
import ctypes
import gc
import itertools
import pickle
import threading
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import lmswap
from lmswap.collection_pause import collection_paused
from lmswap.errors import (
    BudgetExceeded,
    BytesChanged,
    DriverError,
    OptionError,
    PlanInfeasible,
    TierError,
    TransferError,
)
from lmswap.hardware.memory import _RESIDENT, CpuMemory
from lmswap.module_checks import one_device
from lmswap.runtime import _C
from tests.models import CASES, LARGE, Broken, BrokenBlock, Case, UntrainedMiddle, quick_of, tight_budget
from tests.training import loss_and_gradients, same_bits

POLICIES = ("none", "swap_all", "tflms", "auto")
SMALL = 4096  # swap nearly everything: the test models are small


def train(case: Case, policy: str, *, num_steps: int = 3, autocast: bool = False, budget: int | str = "auto"):
    """Losses, gradients, parameters and buffers of a few steps with an optimizer, and the model's report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make()
    lmswap.enable(model, budget=budget, policy=policy, min_swap_bytes=SMALL)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    results = []
    for _ in range(num_steps):
        batch = case.batch()
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
            loss = case.loss(model(batch))
        results += loss_and_gradients(model, loss)
        optimizer.step()
        optimizer.zero_grad()
    report = lmswap.report(model)
    results += [value.clone() for value in model.state_dict().values()]
    lmswap.disable(model)
    return results, report


# In bf16 large ones take a minute on CPUs without instructions for it.
QUICK = [("resnet_channels_last", False), ("encoder", False), ("shared_views", False), ("shared_views", True)]


@pytest.mark.parametrize(("name", "autocast"), quick_of(itertools.product(CASES, (False, True)), QUICK))
def test_every_policy_gives_the_same_bits(name, autocast):
    expected, _ = train(CASES[name], "none", autocast=autocast)
    if autocast:
        again, _ = train(CASES[name], "none", autocast=autocast)
        if not all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)):
            # Seen on an AMD EPYC: weight gradients of bf16 convolutions, in plain eager torch as well.
            pytest.skip("torch's own operators give other bits from run to run on this machine")
    # Autocast makes other graphs, not other policies: what "tflms" chooses is tried without it.
    for policy in ("swap_all", "auto") if autocast else POLICIES[1:]:
        actual, report = train(CASES[name], policy, autocast=autocast)
        assert same_bits(actual, expected)
        if policy == "swap_all":
            assert report.swapped_out_bytes > 0
            assert report.swapped_in_bytes >= report.swapped_out_bytes


def budget_of_large() -> int:
    train(LARGE, "none", num_steps=1)  # what the process grows by only once
    return tight_budget(train(LARGE, "none", num_steps=1)[1])


@pytest.mark.usefixtures("resident")
def test_swapping_keeps_the_bits_and_tensors_within_the_budget():
    expected, unlimited = train(LARGE, "none")
    actual, report = train(LARGE, "auto", budget=budget_of_large())
    assert same_bits(actual, expected)
    assert report.swapped_out_bytes + report.recomputed_bytes > 0
    assert report.predicted_peak_bytes < unlimited.predicted_peak_bytes


def test_the_model_stays_the_same_object_and_is_given_back():
    model = CASES["resnet"].make()
    keys = list(model.state_dict())
    assert lmswap.enable(model, policy="swap_all") is model
    assert isinstance(model, type(CASES["resnet"].make()))
    assert list(model.state_dict()) == keys
    lmswap.disable(model)
    assert model._compiled_call_impl is None
    lmswap.disable(model)  # harmless
    with pytest.raises(OptionError, match="not enabled"):
        lmswap.report(model)


def test_a_model_that_was_compiled_is_given_back_compiled():
    model = nn.Linear(4, 4)
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    lmswap.disable(lmswap.enable(model))
    assert model._compiled_call_impl is compiled
    with pytest.raises(OptionError, match=r"enable that, and do not compile it"):
        lmswap.enable(torch.compile(model))


class Doubled(nn.Sequential):
    """Code of its own, which torch.compile captures."""

    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: Doubled(nn.Linear(4, 4), nn.Tanh())])
def test_an_enabled_model_refuses_in_place_compile(make):
    model, graphs, plain = make(), [], make()
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph)
    lmswap.enable(model)
    assert any("compile() made does not run while the model is enabled" in note for note in lmswap.report(model).notes)
    model(torch.ones(2, 4)).sum().backward()
    assert not graphs
    with pytest.raises(OptionError, match="is enabled, and what compile"):
        model.compile()
    model(torch.ones(2, 4)).sum().backward()
    assert lmswap.report(model).steps == 2
    plain.compile(backend="eager")  # a model that is not enabled may be compiled
    lmswap.disable(model)
    model(torch.ones(2, 4))
    assert len(graphs) == isinstance(model, Doubled)  # torch captures none of its own modules' code
    model.compile(backend="eager")


def test_report_on_parent_of_enabled_module_names_the_child():
    inner = lmswap.enable(nn.Linear(4, 4))
    with pytest.raises(OptionError, match=r"Sequential is not enabled, its module '1' is: pass that"):
        lmswap.report(nn.Sequential(nn.ReLU(), inner))
    lmswap.disable(inner)


@pytest.fixture
def _no_collections(no_garbage):
    """What lies in a cycle stays until the test, or what it calls, collects: no collection by chance takes it."""
    with collection_paused():
        yield


def enabled_and_trained(*, gives_optimizer=True):
    """An enabled model after a step, and its optimizer."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    lmswap.enable(model, optimizer=optimizer if gives_optimizer else None)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.usefixtures("_no_collections")
def test_modules_of_a_dropped_model_can_be_enabled():
    inner = nn.Linear(4, 4)
    lmswap.enable(nn.Sequential(inner, nn.Tanh()))
    assert lmswap.enable(inner) is inner
    outer = nn.Sequential(inner, nn.Tanh())
    with pytest.raises(OptionError, match="Sequential and its module '0' cannot both be enabled"):
        lmswap.enable(outer)
    assert outer._compiled_call_impl is None
    lmswap.disable(inner)
    lmswap.disable(lmswap.enable(outer))


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("gives_optimizer", [False, True])
def test_a_model_that_was_disabled_is_freed_with_its_last_reference(gives_optimizer):
    model, optimizer = enabled_and_trained(gives_optimizer=gives_optimizer)
    lmswap.disable(model)
    gone = [weakref.ref(each) for each in (model, optimizer, model.weight)]
    del model, optimizer
    assert [each() for each in gone] == [None] * 3


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("is_collected_before", [False, True])
def test_a_dropped_model_and_its_optimizer_do_not_count_for_the_next_one(is_collected_before):
    model, optimizer = enabled_and_trained()
    gone = [weakref.ref(each) for each in (model, optimizer, model.weight)]
    del model, optimizer
    if is_collected_before:
        gc.collect()
    following = lmswap.enable(nn.Linear(4, 4))
    assert [each() for each in gone] == [None] * 3
    lmswap.disable(following)


def test_models_that_share_modules_or_parameters_are_enabled_separately():
    shared, alike = nn.Linear(4, 4), nn.Linear(4, 4)
    alike.weight = shared.weight
    models = [nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared), alike]
    for model in models:
        lmswap.enable(model)
    for model in models:
        lmswap.disable(model)


def test_models_can_be_enabled_while_another_thread_lists_sessions():
    others = []

    class Slow(nn.Linear):
        def named_modules(self, *given, **named):
            others.append(lmswap.enable(nn.Linear(4, 4)))  # as another thread does
            return super().named_modules(*given, **named)

    first = lmswap.enable(nn.Linear(4, 4))
    model = lmswap.enable(Slow(4, 4))
    for each in (first, model, *others):
        lmswap.disable(each)


def test_a_signal_at_the_start_of_a_copy_keeps_its_memory_alive():
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    lmswap.enable(model, policy="swap_all", min_swap_bytes=SMALL, link="4MB/s")
    engine, data = lmswap.api._sessions[model].engine, torch.randn(1024, 256)
    model(data).square().mean().backward()
    native = engine.native
    for start in ("in_start", "out_start"):

        def interrupted(*given, start=start):
            started = getattr(native, start)(*given)  # noqa: F841 - held as the frame of the call is
            raise KeyboardInterrupt

        engine.native = Mock(wraps=native, **{start: interrupted})
        with pytest.raises(KeyboardInterrupt):
            model(data).square().mean().backward()
        engine.native = native
        (landing,) = engine._starting.values()
        assert not native.is_idle()
        engine.reap_finished_transfers()
        assert [*engine._starting.values()] == [landing]  # the copy is still at it
        model(data).square().mean().backward()
        model[0].weight.grad.sum().item()  # a GPU has come as far as the host
        engine.reap_finished_transfers()
        assert native.is_idle()
        assert not engine._starting
    lmswap.disable(model)


@pytest.mark.cpu_only("a GPU has no heap of ours, nor a peak that a kernel has to reset")
@pytest.mark.usefixtures("no_garbage")
def test_errors_while_enabling_are_undone(monkeypatch):
    def refuse():
        raise DriverError("the peak of resident memory cannot be measured here")

    monkeypatch.setattr(_RESIDENT, "_reset", refuse)
    num_tasks, num_open = len([*Path("/proc/self/task").iterdir()]), CpuMemory._num_open
    for _ in range(2):
        with pytest.raises(DriverError):
            lmswap.enable(nn.Linear(4, 4))
    assert CpuMemory._num_open == num_open
    assert _C.heap_is_installed() == (num_open > 0)  # by models of tests before
    assert len([*Path("/proc/self/task").iterdir()]) == num_tasks


def test_a_call_from_a_second_thread_during_a_backward_is_refused():
    model, data = lmswap.enable(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), policy="swap_all"), torch.randn(8, 64)
    model(data).sum().backward()
    recorder = lmswap.api._sessions[model].engine.recorder
    begin, reported = recorder.begin_segment, []

    def call():
        with pytest.raises(OptionError, match=r"called while its backward runs in another thread.*take turns"):
            model(data)
        reported.append(True)

    def begin_segment(key):
        if key[1] == "backward":
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        return begin(key)

    recorder.begin_segment = begin_segment
    model(data).sum().backward()
    assert reported == [True]
    lmswap.disable(model)


def test_modules_of_torch_itself_are_captured():
    model = lmswap.enable(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), policy="swap_all")
    model(torch.randn(8, 64)).sum().backward()
    assert lmswap.report(model).steps == 1
    lmswap.disable(model)


def test_copies_of_an_enabled_model_are_plain_models():
    model = lmswap.enable(CASES["encoder"].make(), policy="swap_all", min_swap_bytes=SMALL)
    CASES["encoder"].loss(model(CASES["encoder"].batch())).backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._compiled_call_impl is None
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    lmswap.disable(model)


def test_eval_and_no_grad_give_the_same_bits_and_leave_nothing_behind():
    case = CASES["encoder"]
    torch.manual_seed(0)
    model = case.make().eval()
    batch = case.batch()
    with torch.no_grad():
        lmswap.enable(model, policy="none")
        expected = model(batch)
        lmswap.enable(model, policy="tflms", min_swap_bytes=SMALL)
        for _ in range(3):
            assert torch.equal(model(batch), expected)
    with torch.enable_grad():  # a forward whose backward never comes
        model(batch)
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)


@pytest.mark.parametrize(("make", "num_graphs"), [(Broken, 3), (UntrainedMiddle, 2)])
def test_graphs_that_train_make_one_step_with_one_plan(make, num_graphs):
    case = Case(make, lambda: torch.randn(512, 128))
    expected, _ = train(case, "none", num_steps=4)
    actual, report = train(case, "swap_all", num_steps=4)
    assert same_bits(actual, expected)
    assert report.steps == 4
    assert report.swapped_out_bytes > 0
    torch.manual_seed(0)
    model = lmswap.enable(make(), policy="swap_all", min_swap_bytes=SMALL)
    for _ in range(2):
        case.loss(model(case.batch())).backward()
    phases = [segment.phase for segment in lmswap.program(model).segments]
    assert phases == ["forward"] * num_graphs + ["backward"] * num_graphs
    lmswap.disable(model)


def test_a_graph_that_runs_several_times_in_a_step_is_planned_for_each_run():
    case = Case(lambda: nn.Sequential(BrokenBlock(), BrokenBlock(), BrokenBlock()), lambda: torch.randn(512, 128))
    expected, _ = train(case, "none", num_steps=4)
    actual, report = train(case, "swap_all", num_steps=4)
    assert same_bits(actual, expected)
    assert report.steps == 4
    assert not any("may exceed the budget" in note for note in report.notes)
    one_run_bytes = 512 * 128 * 4  # of each half of each block, at least what exp gave
    assert report.swapped_out_bytes >= 6 * one_run_bytes
    assert sum(row.decision == "swap" for row in report.decisions) >= 6


@pytest.mark.slow
@pytest.mark.cpu_only("its budget is of what tensors hold; on a GPU it is of what is reserved")
def test_a_recurring_order_of_backwards_is_planned_for(no_garbage):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    # Each activation has 16 MiB: what a second forward holds is more than is kept free.
    model, data = copy.deepcopy(plain), torch.randn(2**16, 64)

    def drive(model):
        for step in range(8):  # the fourth is the first of two runs; in the sixth they are distinguished
            num_runs = 1 if step < 3 else 2
            for loss in [model(data * number).square().mean() for number in range(step, step + num_runs)]:
                loss.backward()
            yield lmswap.report(model) if model is not plain else None
        yield [p.grad.clone() for p in model.parameters()]

    *_, expected = drive(plain)
    lmswap.enable(model, budget="270MiB", min_swap_bytes=4096)
    with pytest.warns(BudgetExceeded) as reported:
        *_, report, actual = drive(model)
    assert any("2 forwards ran before their backward" in str(warning.message) for warning in reported)
    assert all(map(torch.equal, actual, expected))
    callers_bytes = 2 * data.nbytes  # the second loss's batch and what its mean reads
    assert report.measured.peak_bytes <= report.predicted_peak_bytes + callers_bytes + 2**20
    lmswap.disable(model)


def test_nothing_is_swapped_twice_and_everything_is_restored():
    _, report = train(CASES["resnet"], "swap_all", num_steps=2)
    swapped = [row for row in report.decisions if row.decision == "swap"]
    assert report.swapped_out_bytes == sum(row.nbytes for row in swapped)
    assert report.tier_used_bytes == 0


class Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "fordblks", "top")
    )


def allocated_bytes() -> int:
    """Bytes allocated by the C library and the heap; unlike resident memory, they are the process's own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.used + found.mapped + _C.heap_stats().live_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage")
def test_two_hundred_steps_leave_tier_files_and_memory_flat():
    case = CASES["shared_views"]
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL)

    def state() -> tuple[int, int]:
        return lmswap.report(model).tier_used_bytes, len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(10):  # the first steps plan, and keep what they have learnt
        case.loss(model(case.batch())).backward()
    gc.collect()
    before, before_bytes = state(), allocated_bytes()
    for _ in range(200):
        case.loss(model(case.batch())).backward()
    gc.collect()
    assert state() == before
    assert allocated_bytes() - before_bytes < 2 * 2**20  # of which the heap's record of changes may fill one
    lmswap.disable(model)


def test_backward_twice_with_retain_graph_gives_the_same_bits():
    case = CASES["resnet"]
    grads = []
    for policy in ("none", "swap_all"):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = lmswap.enable(case.make(), policy=policy, min_swap_bytes=SMALL)
        loss = case.loss(model(case.batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        del loss
        assert lmswap.report(model).tier_used_bytes == 0
        lmswap.disable(model)
    assert same_bits(*grads)


def test_verify_passes_sound_copies_and_catches_a_single_changed_bit(monkeypatch):
    case = CASES["resnet"]
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL, verify=True)
    case.loss(model(case.batch())).backward()
    assert lmswap.report(model).swapped_in_bytes > 0
    engine = lmswap.api._sessions[model].engine
    checked = engine.in_done

    def damaged(token, flat):
        engine._in_flight[engine._swap_in_of[int(token)]][-1] ^= 1  # the copy in has not been waited for, so wait first
        return checked(token, flat)

    def arrive(token, flat):
        while not engine.native.is_finished(engine._swap_in_of[int(token)]):
            pass
        return damaged(token, flat)

    monkeypatch.setattr(engine, "in_done", arrive)
    with pytest.raises(BytesChanged, match="on the way in"):
        case.loss(model(case.batch())).backward()
    lmswap.disable(model)


def test_storages_of_another_length_than_traced_are_restored():
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            h = torch.tanh(self.linear(x))
            h = h * 2
            h[:, 0] = 1.0  # its fill keeps the column's strides: the real storage ends at the last element
            return h.exp() * torch.tanh(h)

    case = Case(Strided, lambda: torch.randn(256, 64))
    expected, _ = train(case, "none")
    actual, report = train(case, "swap_all")
    assert report.swapped_out_bytes > 0
    assert same_bits(actual, expected)


def test_two_forwards_before_their_backwards_give_the_same_bits():
    case = CASES["resnet"]
    grads = []
    for policy in ("none", "swap_all"):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = lmswap.enable(case.make(), policy=policy, min_swap_bytes=SMALL)
        first, second = case.loss(model(case.batch())), case.loss(model(case.batch()))
        second.backward()
        first.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        lmswap.disable(model)
    assert same_bits(*grads)


def test_an_exception_in_mid_step_leaves_the_model_able_to_train():
    case = CASES["resnet"]
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL)
    handle = model.stem.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        case.loss(model(case.batch())).backward()
    handle.remove()
    model.zero_grad()
    case.loss(model(case.batch())).backward()
    gc.collect()
    assert lmswap.report(model).tier_used_bytes == 0
    lmswap.disable(model)


def test_new_shapes_get_their_own_plan():
    model = lmswap.enable(CASES["resnet"].make(), policy="swap_all", min_swap_bytes=SMALL)
    for side in (64, 96, 64):
        model(torch.randn(2, 3, side, side)).sum().backward()
    assert lmswap.report(model).steps == 3
    lmswap.disable(model)


@pytest.mark.slow
def test_many_models_of_one_class_are_all_captured():
    models = [lmswap.enable(CASES["shared_views"].make(), policy="swap_all", min_swap_bytes=SMALL) for _ in range(10)]
    for model in models:
        CASES["shared_views"].loss(model(CASES["shared_views"].batch())).backward()
        assert lmswap.report(model).swapped_out_bytes > 0
        lmswap.disable(model)


def test_torch_compile_takes_lmswap_as_a_backend():
    case = CASES["resnet"]
    torch.manual_seed(0)
    torch.compiler.reset()
    expected, _ = train(case, "none", num_steps=1)
    torch.manual_seed(0)
    torch.compiler.reset()
    model = case.make()
    compiled = torch.compile(model, backend="lmswap", options={"policy": "swap_all", "min_swap_bytes": SMALL})
    loss = case.loss(compiled(case.batch()))
    loss.backward()
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected[1:], strict=False))
    assert lmswap.report(compiled).swapped_out_bytes > 0
    lmswap.disable(compiled)
    with pytest.raises(OptionError, match="not enabled"):
        lmswap.report(compiled)
    with pytest.raises(TransferError, match="closed"):
        compiled(case.batch())
    model(case.batch())


def test_an_infeasible_budget_is_refused_before_any_op_runs():
    needed_bytes = []
    for budget in ("1MiB", "16MiB"):
        model = lmswap.enable(LARGE.make(), budget=budget)
        with pytest.raises(PlanInfeasible) as caught:
            model(LARGE.batch())
        assert caught.value.needed_bytes > caught.value.budget_bytes
        needed_bytes.append(caught.value.needed_bytes)
        assert caught.value.policy == "auto"
        lmswap.disable(model)
        model(LARGE.batch()).sum().backward()  # the process goes on
    assert abs(needed_bytes[1] - needed_bytes[0]) < 24 * 2**20  # which is in use meanwhile; a GPU's in segments of 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"budget": "lots"}, "budget 'lots'"),
        ({"budget": -1}, "more than 0"),
        ({"budget": 0}, "more than 0"),
        ({"budget": 1.5}, "budget must be"),
        ({"budget": True}, "budget must be"),
        ({"budget": "900TiB"}, "more than the device has"),
        ({"policy": "magic"}, "unknown policy 'magic'"),
        ({"tier": "tape"}, "unknown tier 'tape'"),
        ({"tier": "peer:one"}, "'peer:one' names no GPU"),
        pytest.param({"tier": "peer"}, "not on the CPU", marks=pytest.mark.cpu_only("a GPU may have a peer")),
        pytest.param(
            {"tier": "host"}, "memory to memory", marks=pytest.mark.cpu_only("host memory is another one than a GPU's")
        ),
        ({"compiler": "gcc"}, "unknown compiler 'gcc'"),
        ({"verify": "yes"}, "verify must be True or False"),
        ({"min_swap_bytes": "x"}, "min_swap_bytes 'x'"),
    ],
)
def test_bad_options_are_refused_at_enable(arguments, complaint):
    with pytest.raises(OptionError, match=complaint):
        lmswap.enable(nn.Linear(2, 2), **arguments)


def test_unknown_options_are_refused():
    with pytest.raises(OptionError, match="unknown option 'colour'; lmswap has budget, "):
        lmswap.enable(nn.Linear(2, 2), colour="red")
    with pytest.raises(OptionError, match="unknown option 'polcy'; did you mean 'policy'"):
        lmswap.enable(nn.Linear(2, 2), polcy="swap")
    compiled = torch.compile(nn.Linear(2, 2), backend="lmswap", options={"colour": "red"})
    with pytest.raises(Exception, match="unknown option 'colour'"):
        compiled(torch.randn(2, 2))


def test_models_that_have_no_single_device_or_no_shapes_are_refused():
    with pytest.raises(OptionError, match="no parameters"):
        lmswap.enable(nn.ReLU())
    with pytest.raises(OptionError, match=r"'1\.weight' of Sequential has no shape yet: call the model once"):
        lmswap.enable(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(OptionError, match=r"no values for '1\.weight', '1\.bias', on 'meta'"):
        lmswap.enable(mixed)
    with pytest.raises(OptionError, match="one device"):
        one_device([*mixed.parameters()])


def test_directories_that_cannot_hold_swapped_bytes_are_refused(tmp_path):
    with pytest.raises(TierError, match="memory"):
        lmswap.enable(nn.Linear(2, 2), tier="disk", disk_directory="/dev/shm")
    with pytest.raises(TierError, match="missing"):
        lmswap.enable(nn.Linear(2, 2), tier="disk", disk_directory=str(tmp_path / "missing"))
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(TierError):
        lmswap.enable(nn.Linear(2, 2), tier="disk", disk_directory=str(file))


def test_a_graph_that_outlives_its_engine_raises():
    case = CASES["resnet"]
    model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=SMALL)
    loss = case.loss(model(case.batch()))
    lmswap.disable(model)
    with pytest.raises(TransferError, match="closed"):
        loss.backward()
