"""Every injected failure is an error with its numbers, leaks nothing, and lets the process train on."""

import contextlib
import functools
import gc
import itertools
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import lmswap
from lmswap.errors import BytesChanged, DriverError, LmswapError, TierError, TransferError
from lmswap.hardware.measure import describe_machine
from lmswap.runtime import _C
from tests.models import CASES, INDUCTOR
from tests.processes import limited
from tests.training import loss_and_gradients, same_bits

CASE = CASES["shared_views"]
ENGINE = _C.Engine
MIB = 2**20


def enable_on_a_disk_that(monkeypatch, faults: str, **options) -> nn.Module:
    describe_machine(torch.device("cpu"), "disk")  # measured, if no test has yet, while the disk is sound
    monkeypatch.setattr("lmswap.session.engine_setup._C.Engine", functools.partial(ENGINE, faults=faults))
    torch.manual_seed(0)
    torch.compiler.reset()
    return lmswap.enable(CASE.make(), policy="swap_all", tier="disk", min_swap_bytes=4096, **options)


def step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    return loss_and_gradients(model, CASE.loss(model(CASE.batch())))


@functools.cache
def expected() -> list[torch.Tensor]:
    """What a step of the model gives where nothing fails."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = lmswap.enable(CASE.make(), policy="none")
    result = step(model)
    lmswap.disable(model)
    return result


def same(actual: list[torch.Tensor]) -> bool:
    return same_bits(actual, expected())


def held() -> tuple[int, int]:
    """Open files and threads of the process."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def engine_of(model: nn.Module):
    return lmswap.api._sessions[model].engine


@contextlib.contextmanager
def a_hook_that_raises(model: nn.Module, error: type[BaseException]) -> Iterator[None]:
    def fail(_: torch.Tensor) -> None:
        raise error

    handle = model.second.bias.register_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def calls_of(name: str, nth: int, model: nn.Module) -> Iterator[None]:
    """There is no memory for the n-th call of a method of the engine."""
    engine, count = engine_of(model), itertools.count(1)
    method = getattr(engine, name)

    def fail(*given):
        if next(count) == nth:
            raise MemoryError
        return method(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, name, fail)
        yield


@contextlib.contextmanager
def no_more_memory(model: nn.Module) -> Iterator[None]:
    """The heap and the C library get no new page from the second copy in of the step on."""
    engine, count = engine_of(model), itertools.count(1)
    in_start = engine.in_start
    with contextlib.ExitStack() as stack:

        def starve(*given):
            if next(count) == 2:
                _C.heap_trim()
                data = re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
                stack.enter_context(limited(resource.RLIMIT_DATA, int(data[1]) * 1024))
                blocks = []
                while True:  # addresses that the heap has used before are no new pages yet
                    blocks.append(torch.empty(2**30, dtype=torch.uint8))
            return in_start(*given)

        stack.callback(setattr, engine, "in_start", in_start)
        engine.in_start = starve
        yield


@dataclass(frozen=True)
class Fault:
    """``inject`` wraps the step that fails, if it is not the disk's doing; ``numbers`` is what the error must say."""

    error: type[BaseException]
    numbers: str
    disk: str = ""
    inject: Callable[[nn.Module], contextlib.AbstractContextManager[None]] = lambda model: contextlib.nullcontext()


COPY = r"disk tier: {} of [\d.]+ .iB \(\d+ bytes\) at offset \d+ failed: Input/output error \(errno 5\)"
FAULTS = {
    "disk is full": Fault(
        TierError, r"cannot reserve .*\d+ bytes.*No space left.*free there: .*bytes", "reserve@1=fail"
    ),
    "file size is limited": Fault(
        TierError,
        r"cannot reserve .*\d+ bytes.*File too large",
        inject=lambda model: limited(resource.RLIMIT_FSIZE, 65536),
    ),
    **{
        f"{call} {nth} fails": Fault(TransferError, COPY.format(call), f"{call}@{nth}=fail")
        for call in ("write", "read")
        for nth in (1, 3)
    },
    "Ctrl-C in the backward": Fault(
        KeyboardInterrupt, "$", inject=lambda model: a_hook_that_raises(model, KeyboardInterrupt)
    ),
    "hook raises": Fault(ZeroDivisionError, "$", inject=lambda model: a_hook_that_raises(model, ZeroDivisionError)),
    **{
        f"no memory in {name} {nth}": Fault(MemoryError, "$", inject=functools.partial(calls_of, name, nth))
        for name in ("out_start", "out_done", "in_start", "in_done")
        for nth in (3,)
    },
    "out of memory in mid-step": Fault(
        RuntimeError, r"can't allocate memory: you tried to allocate \d+ bytes", inject=no_more_memory
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_loses_the_step_and_nothing_else(monkeypatch, fault):
    assert same(expected())
    before = held()
    model = enable_on_a_disk_that(monkeypatch, fault.disk)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(fault.error, match=fault.numbers), fault.inject(model):
        step(model)
    model.load_state_dict(state)  # batch statistics had moved already
    assert same(step(model))
    model.load_state_dict(state)
    assert same(step(model))
    gc.collect()
    engine = engine_of(model)
    engine.reap_finished_transfers()
    assert (len(engine._in_flight), engine.native.live_handles(), lmswap.report(model).tier_used_bytes) == (0, 0, 0)
    lmswap.disable(model)
    assert held() == before


@pytest.mark.parametrize("faults", ["write@*=short", "read@*=short", "write@*=jitter:0.02,read@*=jitter:0.02"])
def test_a_disk_that_is_slow_or_does_half_is_only_slow(monkeypatch, faults):
    model = enable_on_a_disk_that(monkeypatch, faults)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.load_state_dict(state)
        assert same(step(model))
    lmswap.disable(model)


@pytest.mark.parametrize(("verify", "where"), [(True, "in the tier"), (False, "on the way out, in the tier or on")])
def test_a_byte_that_changed_on_the_disk_is_caught(monkeypatch, tmp_path, verify, where):
    model = enable_on_a_disk_that(monkeypatch, "", verify=verify, disk_directory=str(tmp_path))
    loss = CASE.loss(model(CASE.batch()))
    engine = engine_of(model)
    nbytes = engine.native.tier_stats("disk").capacity_bytes
    files = [link for link in Path("/proc/self/fd").iterdir() if link.is_file() and link.stat().st_size == nbytes]
    (file,) = [link for link in files if link.readlink().is_relative_to(tmp_path)]
    offsets = [swap.offset for swap in lmswap.api._sessions[model].current_step().plan.swaps]
    while not all(engine.native.is_finished(transfer) for transfer in engine._in_flight):
        pass
    with file.open("r+b", buffering=0) as changed:
        for offset in offsets:
            changed.seek(offset)
            (byte,) = changed.read(1)
            changed.seek(offset)
            changed.write(bytes([byte ^ 1]))
    with pytest.raises(BytesChanged, match=rf"buffer '[^']+', made by op .*models\.py:\d+.* were changed {where}"):
        loss.backward()
    step(model)
    lmswap.disable(model)


@pytest.mark.parametrize("compiler", ["fx", "eager", INDUCTOR])
def test_a_bit_flipped_on_the_way_from_the_disk_is_an_error(monkeypatch, compiler):
    model = enable_on_a_disk_that(monkeypatch, "read@2=flip", compiler=compiler)
    with pytest.raises(BytesChanged, match=r"buffer '.+', made by .* were changed on the way out"):
        step(model)
    assert all(parameter.grad is None for parameter in model.parameters()) or compiler == "eager"
    step(model)
    engine = engine_of(model)
    gc.collect()
    engine.reap_finished_transfers()
    assert (len(engine._in_flight), len(engine._swap_in_of), engine.native.live_handles()) == (0, 0, 0)
    lmswap.disable(model)


@pytest.mark.cpu_only("faults of copies beside the disk are injected into the CPU's driver")
def test_a_bit_flipped_in_host_memory_stops_the_step(monkeypatch):
    monkeypatch.setattr(
        "lmswap.session.engine_setup.resolve_tier", lambda *_: "host"
    )  # memory beside the CPU's, as beside a GPU's
    unseen = enable_on_a_disk_that(monkeypatch, "copy_in@*=flip")
    assert not same(step(unseen))
    lmswap.disable(unseen)
    model = enable_on_a_disk_that(monkeypatch, "copy_in@1=flip", verify=True)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BytesChanged, match=r"buffer '[^']+', made by op .*models\.py:\d+.* in the tier"):
        step(model)
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert lmswap.report(model).verified.num_differences == 1
    assert same(step(model))
    lmswap.disable(model)


KILLED = """
import os, signal, sys, torch, lmswap
from tests.models import CASES
case = CASES["shared_views"]
model = lmswap.enable(case.make(), policy="swap_all", min_swap_bytes=4096, disk_directory=sys.argv[1])
loss = case.loss(model(case.batch()))
assert lmswap.api._sessions[model].engine.native.live_handles() > 0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("library", "message"),
    [("libmissing.so.1", "libmissing.so.1"), ("libm.so.6", "cuInit|cuGetErrorName")],
    ids=["missing", "another library"],
)
def test_an_unusable_driver_is_reported_with_its_name(library, message):
    with pytest.raises(DriverError, match=message):
        _C.Engine(driver="cuda", library=library)
    assert issubclass(DriverError, LmswapError)


def test_a_driver_that_is_too_old_is_reported_with_its_version(tmp_path):
    library = tmp_path / "libcuda.so"
    source = Path(__file__).parents[1] / "cpp" / "old_driver.cpp"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    with pytest.raises(DriverError, match=r"CUDA 10\.2; lmswap needs"):
        _C.Engine(driver="cuda", library=str(library))
