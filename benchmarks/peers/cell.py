"""The cost of one way of training: a few steps in a fresh process → peak, step time, bits."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.peers.tasks import TASKS, Task
from benchmarks.peers.ways import PEERS, Call
from lmswap.errors import PlanInfeasible
from lmswap.hardware.memory import DeviceMemory, device_memory
from lmswap.hardware.mkl_init import initialize_mkl

WARM_UP_STEPS = 4  # the first captures, plans and compiles, the fourth may plan again
# One right after the other, for what lmswap measures of a step beside what it predicts: between turns lie seconds in
# which a shared machine changes its speed, and others take the caches.
STEADY_STEPS = 3
TIMED_STEPS = 4  # in turns
REFERENCE = "none"  # lmswap's backend without a plan: what peaks, times and bits are compared with


@dataclass(frozen=True)
class Cell:
    """What is run: a model of a size, a way (a policy of lmswap or a peer), and how much memory it may take."""

    model: str
    size: str
    device: str
    way: str
    percent: int | None  # of the peak of the reference; None: as much as it likes
    budget_bytes: int | None


@dataclass(frozen=True)
class Prediction:
    """What lmswap said of the step and what it measured itself; both count what its own report counts.

    ``measured_seconds`` is the median of the steady steps; the peak is of all that follow the warm-up.
    """

    peak_bytes: int
    measured_peak_bytes: int
    seconds: float
    measured_seconds: float


# Of a step, by name of a result: a digest of its bytes.
Bits = Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What came out: the highest peak of all steps but the first, and the seconds of the timed ones.

    Peaks are what the process grew by (CPU) or what torch allocated (CUDA). ``overhead`` is the median over the timed
    steps of each over the reference's.

    ``status`` is "ran", "infeasible", with ``needed_bytes`` as the smallest budget that would do, or "failed".
    ``bits`` are of each step's loss, each gradient, and each parameter after it; ``other_from_step`` is the first step
    whose bits are not the reference's, None if all are, and ``others`` names the results that are others then.
    """

    cell: Cell
    status: str
    peak_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    overhead: float | None = None
    bits: tuple[Bits, ...] = ()
    other_from_step: int | None = None
    others: tuple[str, ...] = ()
    needed_bytes: int | None = None
    prediction: Prediction | None = None
    detail: str = ""


def run_cell(cell: Cell, wait_for_turn: Callable[[], None] = lambda: None) -> Outcome:
    """Trains in this process, which should be fresh: what ran before in it would count or hide memory.

    ``wait_for_turn`` is called before each step that is timed beside others'.
    """
    initialize_mkl()
    try:
        return _train(cell, wait_for_turn)
    except PlanInfeasible as refusal:
        return Outcome(cell, "infeasible", needed_bytes=refusal.needed_bytes)
    except Exception as error:  # a peer may break in any way, and the others still have to run
        return Outcome(cell, "failed", detail=f"{type(error).__name__}: {error}"[:500])


def _train(cell: Cell, wait_for_turn: Callable[[], None]) -> Outcome:
    task, device = TASKS[cell.size][cell.model], torch.device(cell.device)
    torch.manual_seed(0)
    with device:
        model, batch = task.make_model(), task.make_batch()
    _warm_up(cell, device)
    memory = device_memory(device)
    try:
        with _applied(cell, task, model) as call:
            training = _Training(lambda: task.loss(call(*batch)), model, memory)
            for _ in range(WARM_UP_STEPS):
                training.step()
            memory.lap_peaks(restart=True)  # the third step, whose ops are timed, takes up to 20 MiB more
            steady_seconds = []
            for _ in range(STEADY_STEPS):
                training.step()
                steady_seconds.append(None if cell.way in PEERS else lmswap.report(model).measured_seconds)
            for _ in range(TIMED_STEPS):
                wait_for_turn()
                training.step()
            prediction = None if cell.way in PEERS else _prediction(model, steady_seconds)
    finally:
        memory.close()
    seconds = tuple(training.seconds[-TIMED_STEPS:])
    return Outcome(cell, "ran", training.peak_bytes, seconds, bits=tuple(training.bits), prediction=prediction)


def _warm_up(cell: Cell, device: torch.device) -> None:
    """Lets a tiny model go the same way: what that loads is not the model's memory."""
    model = nn.Linear(2, 2).to(device)
    task = Task(lambda: model, lambda: (torch.zeros(2, 2, device=device),), (nn.Linear,))
    free = Cell(cell.model, cell.size, cell.device, REFERENCE if cell.way not in PEERS else cell.way, 50, None)
    with _applied(free, task, model) as call:
        task.loss(call(*task.make_batch())).backward()
    torch.compiler.reset()


@contextmanager
def _applied(cell: Cell, task: Task, model: nn.Module) -> Iterator[Call]:
    if cell.way in PEERS:
        with PEERS[cell.way].apply(model, task, 100 if cell.percent is None else cell.percent) as call:
            yield call
        return
    yield lmswap.enable(model, "auto" if cell.budget_bytes is None else cell.budget_bytes, policy=cell.way)
    lmswap.disable(model)


class _Training:
    """Takes steps: seconds and digests of each, and the highest peak of all but the first; others may reset it."""

    def __init__(self, compute_loss: Callable[[], Tensor], model: nn.Module, memory: DeviceMemory) -> None:
        self._compute_loss, self._model, self._memory = compute_loss, model, memory
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.seconds: list[float] = []
        self.bits: list[Bits] = []
        self.peak_bytes = 0
        torch.manual_seed(1)

    def step(self) -> None:
        if len(self.seconds) == 1:
            self._memory.lap_peaks(restart=True)
            self.peak_bytes = 0
        started = time.perf_counter()
        loss = self._compute_loss()
        loss.backward()
        self._memory.synchronize()
        self.seconds.append(time.perf_counter() - started)
        self.peak_bytes = max(self.peak_bytes, self._memory.lap_peaks()[0])
        results = {"loss": _digest(loss)}
        trained = {name: parameter for name, parameter in self._model.named_parameters() if parameter.grad is not None}
        results |= {f"gradient of {name}": _digest(parameter.grad) for name, parameter in trained.items()}
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.bits.append(results | {name: _digest(parameter) for name, parameter in trained.items()})


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()[:8]


def _prediction(model: nn.Module, steady_seconds: Sequence[float | None]) -> Prediction | None:
    report = lmswap.report(model)
    figures = (report.predicted_peak_bytes, report.measured_peak_bytes, report.predicted_seconds, *steady_seconds)
    if any(figure is None for figure in figures):
        return None
    return Prediction(*figures[:3], statistics.median(figures[3:]))  # type: ignore[arg-type]
