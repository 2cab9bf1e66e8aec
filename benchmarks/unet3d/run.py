"""Runs one configuration of the benchmark in this process: ``python -m benchmarks.unet3d.run``.

The configuration is a JSON file; what happens goes to the file descriptor ``--events``, one JSON object a line:
"phase", "memory", "step", "ready" between the warm-up and the timed steps, and at last "result" or "failed". With
``--start FD`` the timed steps begin when a line comes from there; in a configuration that takes turns each of them is
preceded by a "ready", and waits for a line. A process runs one configuration only, so that a peak is that
configuration's own.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.unet3d.configuration import Configuration
from benchmarks.unet3d.measured import Run, swapping_of
from benchmarks.unet3d.memory import (
    CudaMeter,
    MeasurementError,
    MemorySampler,
    Meter,
    ResidentMeter,
    cpu_tensor_peak_bytes,
    import_lmswap,
    thin,
)
from benchmarks.unet3d.network import UNet3d
from benchmarks.unet3d.preprocess import Cubes, load_cubes
from benchmarks.unet3d.recipe import make_optimizer, make_schedule, take_step
from lmswap.errors import LmswapError
from lmswap.hardware.mkl_init import initialize_mkl
from lmswap.ir.emulation import EmulatedLink
from lmswap.profiling.collect import EngineRecorder
from lmswap.profiling.figures import Figures, figures_of
from lmswap.profiling.recording import Recording
from lmswap.profiling.trace import Stall

Event = dict[str, Any]
_EVENT_PERIOD_SECONDS = 0.25  # between reports of memory to the parent


class Trainer:
    """The training loop of the recipe over cubes held in memory; batch 1, subjects in turn."""

    def __init__(self, model: nn.Module, cubes: Cubes, configuration: Configuration) -> None:
        self.model, self._cubes = model, cubes
        self._device, self._dtype = torch.device(configuration.device), configuration.dtype
        self.optimizer = make_optimizer(model.parameters(), configuration.ranks)
        self._schedule = make_schedule(self.optimizer)
        self._epoch_losses: list[float] = []
        self._steps = 0

    def step(self) -> Tensor:
        """One step of the recipe; returns the loss, on the CPU. An epoch's mean loss drives the schedule."""
        images, truth = self._batch(self._steps % len(self._cubes.images))
        value = take_step(self.model, self.optimizer, images, truth, self._dtype)
        self._steps += 1
        self._epoch_losses.append(value.item())
        if self._steps % len(self._cubes.images) == 0:
            self._schedule.step(sum(self._epoch_losses) / len(self._epoch_losses))
            self._epoch_losses.clear()
        return value

    def _batch(self, subject: int) -> tuple[Tensor, Tensor]:
        one = slice(subject, subject + 1)
        return self._cubes.images[one].to(self._device), self._cubes.truth[one].to(self._device)


def run(
    configuration: Configuration,
    emit: Callable[[Event], None],
    wait_for_start: Callable[[], object] = lambda: None,
    share: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Run:
    """Train ``configuration.steps`` steps and measure them.

    Everything that training needs but a step does not make (cubes, weights) is in memory before the first reading.

    Args:
        configuration: what is trained, how, and where.
        emit: gets each event: phases, steps, and what is measured in them.
        wait_for_start: called after the warm-up steps; timed ones begin when it returns.
        share: wraps the model, where several processes train it together.

    Returns:
        Seconds and losses by step, peaks in bytes, and lmswap's report if the configuration has a policy.
    """
    device = torch.device(configuration.device)
    if configuration.threads is not None:
        torch.set_num_threads(configuration.threads)
    torch.manual_seed(configuration.seed)
    emit({"event": "phase", "phase": "loading"})
    cubes = load_cubes([Path(path) for path in configuration.cubes])
    model: nn.Module = UNet3d(head=configuration.head).to(device)
    trainer = Trainer(model, cubes, configuration)
    if configuration.cap_bytes is not None:
        _cap_cuda_memory(configuration.cap_bytes)
    if configuration.policy is not None:
        import_lmswap()
    gc.collect()

    emit({"event": "phase", "phase": "first step"})
    meter: CudaMeter | ResidentMeter = CudaMeter() if device.type == "cuda" else ResidentMeter()
    if configuration.policy is not None:
        lmswap.enable(model, policy=configuration.policy, **_options(configuration))
    trainer.model = share(model)
    losses: list[Tensor] = []
    spans: list[tuple[float, float]] = []
    profile: Profile | None = None
    with MemorySampler(meter, _throttled(emit)) as sampler:
        for step in range(configuration.steps):
            first, last = configuration.warm_up_steps, configuration.steps - 1
            if step == first or (configuration.takes_turns and step > first):
                emit({"event": "ready"})
                wait_for_start()
            # Others' turns are no time of this training.
            if configuration.policy is not None and step == (last if configuration.takes_turns else first):
                profile = Profile(step)
            begun = time.perf_counter()
            losses.append(trainer.step())
            spans.append((begun, _finish(device)))
            if profile is not None:
                profile.step_ended()
            seconds = spans[-1][1] - begun
            emit({"event": "step", "step": step + 1, "loss": losses[-1].item(), "seconds": seconds})
    peak_bytes = meter.peak_bytes()
    swapping = swapping_of(model) if configuration.policy is not None else None
    figures, stalls = profile.end() if profile is not None else (None, ())
    weights_sha256 = _weights_sha256(model)

    memory = sampler.between(*spans[-1])
    tensor_peak_bytes: int | None = None
    if isinstance(meter, CudaMeter):
        tensor_peak_bytes = meter.tensor_peak_bytes()
        memory = list(swapping.tensor_memory) if swapping is not None else _wait_and_sample(trainer, meter)
    elif configuration.counts_tensors:
        emit({"event": "phase", "phase": "counting"})
        tensor_peak_bytes = _optimizer_bytes(trainer.optimizer) + cpu_tensor_peak_bytes(trainer.step)
    if configuration.policy is not None:
        lmswap.disable(model)
    return Run(
        configuration=configuration,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        threads=torch.get_num_threads(),
        losses=tuple(loss.item() for loss in losses),
        loss_bits=tuple(struct.pack(">f", loss.item()).hex() for loss in losses),
        weights_sha256=weights_sha256,
        step_seconds=tuple(end - begun for begun, end in spans),
        step_ends=tuple(end for _, end in spans),
        peak_bytes=peak_bytes,
        tensor_peak_bytes=tensor_peak_bytes,
        memory=thin(memory),
        swapping=swapping,
        figures=figures,
        stalls=stalls,
    )


class Profile:
    """The engine's own record over consecutive steps, from step ``number`` on."""

    def __init__(self, number: int) -> None:
        self._recorder = EngineRecorder()
        self._recording = Recording([self._recorder], number)

    def step_ended(self) -> None:
        """Ends a step; the next one begins."""
        self._recording.step_ended()

    def end(self) -> tuple[Figures, tuple[Stall, ...]]:
        """The figures of all steps, and what stalled in them."""
        self._recording.stop()
        (trace,) = self._recorder.traces(self._recording.steps)
        return figures_of(trace.timeline), trace.stalls


def _options(configuration: Configuration) -> dict[str, Any]:
    options: dict[str, Any] = {"tier": configuration.tier}
    if configuration.budget_bytes is not None:
        options["budget"] = configuration.budget_bytes
    if configuration.link is not None:
        options["link"] = replace(EmulatedLink.parse(configuration.link), shared_file=configuration.link_file)
    return options


def _finish(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    )


def _cap_cuda_memory(cap_bytes: int) -> None:
    """Makes torch's allocator refuse what would go beyond ``cap_bytes``, as a smaller card would."""
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total_bytes, 1.0))


def _wait_and_sample(trainer: Trainer, meter: Meter) -> list[tuple[float, int]]:
    """Memory over one further step in which the host waits for each layer, so that bytes and time belong together."""

    def wait(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        torch.cuda.synchronize()
        if output.requires_grad:
            output.register_hook(lambda _gradient: torch.cuda.synchronize())  # type: ignore[no-untyped-call]

    hooks = [module.register_forward_hook(wait) for module in trainer.model.modules()]
    start = time.perf_counter()
    with MemorySampler(meter, period_seconds=0.001) as sampler:
        trainer.step()
        end = _finish(torch.device("cuda"))
    for hook in hooks:
        hook.remove()
    return sampler.between(start, end)


def _throttled(emit: Callable[[Event], None]) -> Callable[[int], None]:
    last = 0.0

    def on_sample(nbytes: int) -> None:
        nonlocal last
        if time.perf_counter() - last >= _EVENT_PERIOD_SECONDS:
            last = time.perf_counter()
            emit({"event": "memory", "bytes": nbytes})

    return on_sample


def main() -> int:
    """Run the configuration of the command line and report to the parent; return 0 if it finished."""
    initialize_mkl()
    parser = argparse.ArgumentParser()
    parser.add_argument("configuration", type=Path)
    parser.add_argument("--events", type=int, default=1, metavar="FD")
    parser.add_argument("--start", type=int, metavar="FD")
    arguments = parser.parse_args()
    configuration = Configuration.from_json(arguments.configuration.read_text())
    lock = threading.Lock()  # the sampler's thread writes too
    with (
        os.fdopen(arguments.events, "w", buffering=1) as events,
        nullcontext() if arguments.start is None else os.fdopen(arguments.start) as start,
    ):

        def emit(event: Event) -> None:
            with lock:
                events.write(json.dumps(event) + "\n")

        def wait_for_start() -> None:
            if start is not None and not start.readline():
                sys.exit()  # the process that has started this one has ended

        try:
            emit({"event": "result", "run": asdict(run(configuration, emit, wait_for_start))})
        except (LmswapError, MeasurementError, torch.OutOfMemoryError) as error:
            emit({"event": "failed", "message": str(error)})
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
