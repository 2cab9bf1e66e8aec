"""One way to run a task in this process, which should be fresh: steps → peak, seconds, bytes copied in, bits."""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.first_hour.networks import digest
from benchmarks.weights.outcomes import LMSWAP, Outcome, Run
from benchmarks.weights.tasks import make_task
from benchmarks.weights.ways import WAYS, Limits
from lmswap.errors import PlanInfeasible
from lmswap.hardware.memory import DeviceMemory, device_memory
from lmswap.hardware.mkl_init import initialize_mkl
from lmswap.planner import import_search

Found = TypeVar("Found", bound=Outcome)

_CARD = 1.02  # of the budget: what torch may take of a GPU
_OF_REPORT = (
    *("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "predicted_seconds", "free_seconds"),
    *("bound_seconds", "stall_seconds", "swapped_in_bytes", "swapped_out_bytes", "recomputed_bytes", "notes"),
)


def train(run: Run, wait_for_turn: Callable[[], None] = lambda: None) -> Outcome:
    """Run all steps, see `measure`; ``wait_for_turn`` is called before each step in turns."""
    return measure(run, lambda memory: _train(run, wait_for_turn, memory), Outcome)


def measure(run: Run, steps: Callable[[DeviceMemory], Found], kind: type[Found]) -> Found:
    """Call ``steps`` with the device's memory, in a process that has run a tiny model; errors are outcomes too."""
    initialize_mkl()
    try:
        return _measure(run, steps)
    except PlanInfeasible as refusal:
        return kind(run, "infeasible", str(refusal)[:600])
    except Exception as error:  # a way may break as it likes, and the others still have to run
        return kind(run, "failed", f"{type(error).__name__}: {error}"[:600])


def _measure(run: Run, steps: Callable[[DeviceMemory], Found]) -> Found:
    device = torch.device(run.device)
    if device.type == "cuda":
        _repeat_bits()
        if run.budget_bytes is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, _CARD * run.budget_bytes / total_bytes))
    _warm_up(run, device)
    memory = device_memory(device)
    try:
        return steps(memory)
    finally:
        memory.close()


def _train(run: Run, wait_for_turn: Callable[[], None], memory: DeviceMemory) -> Outcome:
    training = _Training(run, memory)
    for _ in range(run.steps.warm_up):
        training.step()
    training.begin_measuring()
    own_seconds = []
    for _ in range(run.steps.steady):
        training.step()
        own_seconds.append(training.own_seconds())
    for _ in range(run.steps.timed):
        wait_for_turn()
        training.step()
    return training.outcome(own_seconds)


class _Training:
    """A task's model that runs in one way, step by step."""

    def __init__(self, run: Run, memory: DeviceMemory) -> None:
        self._run, self._memory, self._device = run, memory, torch.device(run.device)
        self._task = make_task(run.task, run.size, run.tokens)
        torch.manual_seed(0)
        self._model = self._task.make_model()
        memory.trim()
        limits = Limits(self._device, run.budget_bytes, run.bytes_per_second, run.num_blocks)
        self._applied = WAYS[run.way].apply(self._model, self._task, limits)
        memory.trim()  # weights that have left
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._trained = nn.ParameterList(trained if self._task.trains else [])
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self._seconds: list[float] = []
        self._bits: list[str] = []
        self._peak_bytes = self._bytes_before = self._num_before = 0

    def step(self) -> None:
        """Run a training step, or a call without gradients."""
        batch = [tensor.to(self._device) for tensor in self._task.make_batch(len(self._bits))]
        self._memory.synchronize()
        started = time.perf_counter()
        if self._task.trains:
            result = self._task.loss(self._model(batch[0]), batch)
            result.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad()
        else:
            with torch.no_grad():
                result = self._model(batch[0])
        self._memory.synchronize()
        self._seconds.append(time.perf_counter() - started)
        self._applied.end_step()
        self._peak_bytes = max(self._peak_bytes, self._memory.lap_peaks()[0])
        self._bits.append(tensor_digest(result))

    def begin_measuring(self) -> None:
        """Let peak and copied bytes be of the steps that follow."""
        self._memory.lap_peaks(restart=True)
        self._peak_bytes, self._num_before = 0, len(self._bits)
        self._bytes_before = self._applied.read_bytes() if self._applied.read_bytes is not None else 0

    def own_seconds(self) -> float:
        """What lmswap measured of the last step's graphs."""
        return (lmswap.report(self._model).measured_seconds or 0.0) if self._run.way == LMSWAP else 0.0

    def outcome(self, own_seconds: Sequence[float]) -> Outcome:
        """What came of the steps since `begin_measuring`, of which ``own_seconds`` are lmswap's own figures."""
        report: dict[str, Any] = {}
        read_bytes: float | None = None
        if self._run.way == LMSWAP:
            report, read_bytes = own_figures(self._model, own_seconds), lmswap.report(self._model).swapped_in_bytes
        elif self._applied.read_bytes is not None:
            read_bytes = (self._applied.read_bytes() - self._bytes_before) / (len(self._bits) - self._num_before)
        return Outcome(
            self._run,
            "ran",
            peak_bytes=self._peak_bytes,
            seconds=tuple(self._seconds[len(self._seconds) - self._run.steps.timed :]),
            read_bytes=read_bytes,
            bits=tuple(self._bits),
            trained=digest(self._trained),
            report=report,
        )


def own_figures(model: nn.Module, own_seconds: Sequence[float]) -> dict[str, Any]:
    """What lmswap reports of a model, with the median of ``own_seconds`` as what it measured of steps."""
    found = lmswap.report(model)
    seconds = statistics.median(own_seconds) if own_seconds else None
    return {name: getattr(found, name) for name in _OF_REPORT} | {"measured_seconds": seconds}


def _warm_up(run: Run, device: torch.device) -> None:
    """Train a tiny model in a similar way: what that loads is not the model's memory."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 8))
    model[:3].requires_grad_(False)
    if run.way == LMSWAP:  # within so little that it has to swap
        import_search()  # which it does not if its plan is cached
        lmswap.enable(model, "1%", device=str(device), weights="swap", min_swap_bytes="64KiB")
    model.to(device)
    optimizer = torch.optim.AdamW(model[3].parameters())
    for _ in range(2):
        model(torch.ones(4, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run.way == LMSWAP:
        lmswap.disable(model)
    torch.compiler.reset()


def _repeat_bits() -> None:
    """Let kernels of attention and cuDNN repeat their bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no part of the bits


def tensor_digest(tensor: Tensor) -> str:
    """Equal for tensors of the same bits."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(values.data, digest_size=8).hexdigest()
