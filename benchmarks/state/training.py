"""One way to train a task in this process, which should be fresh: steps → peaks, seconds, bytes copied in, bits."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import lmswap
from benchmarks.state.tasks import TASKS, micro_batches
from benchmarks.state.ways import MAX_NORM, WAYS, Limits
from benchmarks.weights.outcomes import LMSWAP, Outcome, Run
from benchmarks.weights.training import measure, own_figures, tensor_digest
from lmswap.hardware.disk import swap_directory
from lmswap.hardware.memory import DeviceMemory

_RAMP = 4  # steps in which the learning rate rises
FIRST, STEPS, SAVE, LOAD = "first step", "steps", "save", "load"


@dataclass(frozen=True)
class StateOutcome(Outcome):
    """`peak_bytes` is that of all training steps, ``peaks`` are by phase; ``update_seconds`` are a part of ``seconds``.

    The step after saving counts as a part of that. On a CPU the peak of loading is without the bytes of the file, which
    are on the host for other devices. ``trained`` is the digest of the optimizer's state too.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    update_seconds: tuple[float, ...] = ()


def train(run: Run, wait_for_turn: Callable[[], None] = lambda: None) -> StateOutcome:
    """Run all steps, see `measure`; ``wait_for_turn`` is called before each step in turns."""
    return measure(run, lambda memory: _train(run, wait_for_turn, memory), StateOutcome)


def _train(run: Run, wait_for_turn: Callable[[], None], memory: DeviceMemory) -> StateOutcome:
    training = _Training(run, memory)
    with training.phase(FIRST):
        training.step()
    own_seconds = []
    with training.phase(STEPS):
        for _ in range(run.steps.warm_up - 1):
            training.step()
    training.save_and_load()
    with training.phase(STEPS):
        for _ in range(run.steps.steady):
            training.step()
            own_seconds.append(training.own_seconds())
        for _ in range(run.steps.timed):
            wait_for_turn()
            training.step()
    return training.outcome(own_seconds)


class _Training:
    """A task that trains in one way, step by step: accumulation, clipping by norm and a schedule."""

    def __init__(self, run: Run, memory: DeviceMemory) -> None:
        self._run, self._memory, self._device = run, memory, torch.device(run.device)
        self._task, self._way = TASKS[run.task][run.size], WAYS[run.way]
        torch.manual_seed(0)
        self._model = self._task.on_host()
        memory.trim()
        limits = Limits(self._device, run.budget_bytes, run.bytes_per_second, run.num_blocks)
        self._applied = self._way.apply(self._model, self._task, limits)
        memory.trim()  # weights that have left
        self._optimizer = self._applied.optimizer
        self._schedule = LambdaLR(self._optimizer, lambda step: min(1.0, (step + 1) / _RAMP))
        self._trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._seconds: list[float] = []
        self._update_seconds: list[float] = []
        self._bits: list[str] = []
        self._peaks: dict[str, int] = {}

    def step(self) -> None:
        """Train on the next micro-batches."""
        bits, seconds, update_seconds = self._train(len(self._bits))
        self._bits.append(bits)
        self._seconds.append(seconds)
        self._update_seconds.append(update_seconds)

    def _train(self, number: int) -> tuple[str, float, float]:
        """Train on the micro-batches of step ``number``; return digest and seconds, and those of the update alone."""
        task = self._task
        batches = [[each.to(self._device) for each in batch] for batch in micro_batches(task, number)]
        torch.manual_seed(number)  # of dropout
        self._memory.synchronize()
        started = time.perf_counter()
        results = []
        for batch in batches:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=task.is_autocast):
                loss = task.loss(self._applied.called or self._model, batch) / task.micro_batches
            self._applied.backward(loss)
            results.append(loss.detach())
            del loss
        self._memory.synchronize()
        before_update = time.perf_counter()
        results.append(nn.utils.clip_grad_norm_(self._trained, MAX_NORM))
        (self._applied.update or self._optimizer.step)()
        self._schedule.step()
        self._model.zero_grad()
        self._memory.synchronize()
        ended = time.perf_counter()
        return _digest(results), ended - started, ended - before_update

    @contextmanager
    def phase(self, name: str, *, other_bytes: int = 0) -> Iterator[None]:
        """Context whose peak, without ``other_bytes``, counts as that of phase ``name``."""
        self._memory.lap_peaks(restart=True)
        yield
        self._peaks[name] = max(self._peaks.get(name, 0), self._memory.lap_peaks()[0] - other_bytes)

    def save_and_load(self) -> None:
        """Save parameters, state and schedule, train a step that does not count, and load them."""
        if not (self._task.is_saved and self._way.is_saved):
            return
        stateful: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer, "schedule": self._schedule}
        with tempfile.TemporaryDirectory(dir=swap_directory()) as folder:
            files = {name: Path(folder) / f"{name}.pt" for name in stateful}
            with self.phase(SAVE):
                for name, each in stateful.items():
                    torch.save(each.state_dict(), files[name])
                self._train(-1)  # lmswap leaves what has been read in place until then
            for name, each in stateful.items():
                file_bytes = files[name].stat().st_size if self._device.type == "cpu" else 0
                with self.phase(LOAD, other_bytes=file_bytes):
                    each.load_state_dict(torch.load(files[name], map_location="cpu", weights_only=True))
                self._memory.trim()

    def own_seconds(self) -> float:
        """What lmswap measured of the last micro-batch's graphs."""
        return (lmswap.report(self._model).measured_seconds or 0.0) if self._run.way == LMSWAP else 0.0

    def outcome(self, own_seconds: Sequence[float]) -> StateOutcome:
        """What came of all steps, of which ``own_seconds`` are lmswap's own figures."""
        report: dict[str, Any] = {}
        read_bytes: float | None = None
        if self._run.way == LMSWAP:
            report, found = own_figures(self._model, own_seconds), lmswap.report(self._model)
            read_bytes = self._task.micro_batches * (found.swapped_in_bytes or 0) + (found.state_in_bytes or 0)
        elif self._applied.read_bytes is not None:
            read_bytes = self._applied.read_bytes() / len(self._bits)
        first_timed = len(self._seconds) - self._run.steps.timed
        if self._device.type == "cuda":  # all is measured
            torch.cuda.set_per_process_memory_fraction(1.0)
        self._applied.settle()
        return StateOutcome(
            self._run,
            "ran",
            peak_bytes=max(self._peaks[FIRST], self._peaks[STEPS]),
            seconds=tuple(self._seconds[first_timed:]),
            read_bytes=read_bytes,
            bits=tuple(self._bits),
            trained=_digest((*self._model.parameters(), *self._model.buffers(), *self._state())),
            report=report,
            peaks=self._peaks,
            state_bytes=sum(tensor.nbytes for tensor in self._state()),
            update_seconds=tuple(self._update_seconds[first_timed:]),
        )

    def _state(self) -> list[Tensor]:
        """The optimizer's tensors, in order; none of one that has several optimizers in it."""
        states = self._optimizer.state_dict().get("state", {})
        return [each for number in sorted(states) for each in states[number].values() if isinstance(each, Tensor)]


def _digest(tensors: Iterable[Tensor]) -> str:
    digests = (tensor_digest(tensor.to_local() if hasattr(tensor, "to_local") else tensor) for tensor in tensors)
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
