"""One way to train a task, in a process of its own."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import lmswap
from benchmarks.shapes.tasks import TASKS

PLAIN, LMSWAP, PADDED, COMPILED = "plain torch", "lmswap", "lmswap, padded", "torch.compile(dynamic=True)"
WAYS = (PLAIN, LMSWAP, PADDED, COMPILED)
_MULTIPLE = 64  # to which sizes are padded


@dataclass(frozen=True)
class Training:
    """A task that is trained in one way."""

    task: str
    way: str
    budget: str
    steps: int
    device: str = "cpu"


@dataclass(frozen=True)
class Timed:
    """Seconds of each step, a hash of the losses, and what the report says; or why there are none."""

    training: Training
    seconds: tuple[float, ...] = ()
    losses: str = ""
    num_traces: int = 0
    num_sized_plans: int = 0  # of traces that serve several sizes
    num_over: int = 0  # steps over the budget
    detail: str = ""


def train(training: Training, wait_for_turn: Callable[[], None]) -> Timed:
    """Train in this process, which should be fresh; ``wait_for_turn`` is called before each step."""
    task, draw = TASKS[training.task], random.Random(0)
    torch.manual_seed(0)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters())
    is_managed = training.way in (LMSWAP, PADDED)
    called = torch.compile(model, dynamic=True) if training.way == COMPILED else model
    if is_managed:
        lmswap.enable(model, training.budget)
    seconds, losses, num_over = [], hashlib.sha256(), 0
    for _ in range(training.steps):
        sizes = task.draw(draw)
        if training.way == PADDED:
            sizes = tuple(-(-size // _MULTIPLE) * _MULTIPLE for size in sizes)
        batch = task.batch(*sizes)
        wait_for_turn()
        started = time.perf_counter()
        loss = called(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        losses.update(loss.detach().numpy().tobytes())
        if is_managed:
            report = lmswap.report(model)
            num_over += (report.measured_peak_bytes or 0) > report.budget_bytes
    counts = {}
    if is_managed:
        report = lmswap.report(model)
        counts = {"num_traces": report.num_traces, "num_sized_plans": report.num_sized_plans, "num_over": num_over}
        lmswap.disable(model)
    return Timed(training, tuple(seconds), losses.hexdigest(), **counts)
