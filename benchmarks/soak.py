"""Long training under swapping with random faults, compared with a plain model.

    python -m benchmarks.soak --steps 10000
    python -m benchmarks.soak --course large --steps 1000

Copies fail, are cut short and come late at random, bytes change on the disk, memory runs out, hooks raise, Ctrl-C is
pressed, outputs are dropped. A step that one of them cuts short is lost and nothing else is: after every step that
survives, gradients and parameters are compared bitwise with those of the plain model, and resident memory, open
files, threads and what the engine holds must stay flat. In the other course nothing goes wrong, and tensors are large.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import lmswap
from benchmarks.unet3d import study
from benchmarks.unet3d.ending import run_to_end
from benchmarks.unet3d.files import write_text
from lmswap.errors import LmswapError
from lmswap.hardware.measure import describe_machine
from lmswap.reporting.text import print_result
from lmswap.runtime import _C
from lmswap.runtime.engine import SwapEngine

RESULTS = Path(__file__).parent / "results"

# Shares of all calls. A step makes some 20 copies in each direction, so the disk alone ends one step in eight.
DISK_FAULTS = (
    "write@0.003=fail,read@0.003=fail,write@0.02=short,read@0.02=short,write@0.002=late:0.02,read@0.002=late:0.02,"
    "write@*=jitter:0.0005,read@*=jitter:0.0005"
)
# What else goes wrong.
_ACCIDENTS = ("output dropped", "loss raises", "gradient hook raises", "Ctrl-C", "out of memory", "byte changed")
_SAMPLE_STEPS = 100
_MIB = 2**20


@dataclass(frozen=True)
class Course:
    """What is trained through: batches of ``shape``, faults of the disk, and how often each accident happens."""

    shape: tuple[int, int, int]  # batch, tokens, width
    disk_faults: str
    accident_share: float
    options: dict[str, Any]  # of `lmswap.enable`


COURSES = {
    "faults": Course((16, 16, 32), DISK_FAULTS, 0.02, {"min_swap_bytes": 4096, "verify": True}),
    # Of 4.5 to 13.5 MiB: the heap serves them in huge pages, which it moves, and copies go to and from them directly.
    "large": Course((96, 192, 64), "", 0.0, {}),
}


@dataclass(frozen=True)
class Sample:
    """Memory of the process and of the engine between two steps, in bytes; RSS as the kernel counts it."""

    step: int
    resident_bytes: int
    open_files: int
    threads: int
    live_handles: int
    tier_used_bytes: int
    held_tensors: int


@dataclass(frozen=True)
class Soak:
    """``survived`` counts the steps that were compared bitwise; ``lost_to`` says what ended the others.

    ``out_bytes`` went out in the last step.
    """

    steps: int
    survived: int
    lost_to: dict[str, int]
    disk_faults: str  # see csrc/include/lmswap/faults.h
    out_bytes: int
    samples: tuple[Sample, ...]

    def grown_bytes(self, first_step: int) -> int:
        """Growth of resident memory, in bytes, from the first sample at or after ``first_step`` to the last."""
        since = [sample for sample in self.samples if sample.step >= first_step]
        return since[-1].resident_bytes - since[0].resident_bytes


class UserError(Exception):
    """What a user's own code raises in mid-step."""


class Pressed(KeyboardInterrupt):
    """Ctrl-C as an accident; that of who watches ends the soak."""


class Network(nn.Module):
    """Norms, attention, views of one tensor, writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(width, 3 * width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two rounds of attention."""
        for _ in range(2):
            query, key, value = self.inner(self.norm(x)).chunk(3, -1)
            weights = torch.softmax(query @ key.transpose(-1, -2) / 6, -1)
            x = x + torch.tanh(self.outer(weights @ value))
            x[:, 0] = 0.5
        return x


def soak(num_steps: int, *, seed: int = 0, course: str = "faults", show: Callable[[str], None] = print_result) -> Soak:
    """Trains a swapped and a plain model side by side.

    Raises:
        AssertionError: a step that survived has other bits than the plain model's, or something is left behind.
    """
    numbers, through = random.Random(seed), COURSES[course]
    torch.manual_seed(seed)
    plain = Network(through.shape[-1])
    with tempfile.TemporaryDirectory() as directory:
        swapped = _enabled(copy.deepcopy(plain), through, directory)
        try:
            return _train(plain, swapped, through, num_steps, numbers, show)
        finally:
            lmswap.disable(swapped)


def _enabled(model: nn.Module, course: Course, directory: str) -> nn.Module:
    describe_machine(torch.device("cpu"), "disk", directory)  # measured while the disk is sound
    with mock.patch("lmswap.session.engine_setup._C.Engine", functools.partial(_C.Engine, faults=course.disk_faults)):
        return lmswap.enable(model, policy="swap_all", disk_directory=directory, **course.options)


def _train(  # noqa: PLR0917 - all of them are what is trained, and how
    plain: nn.Module,
    swapped: nn.Module,
    course: Course,
    num_steps: int,
    numbers: random.Random,
    show: Callable[[str], None],
) -> Soak:
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (plain, swapped)]
    lost_to: Counter[str] = Counter()
    samples: list[Sample] = []
    for step in range(1, num_steps + 1):
        batch = torch.randn(course.shape, generator=torch.Generator().manual_seed(step))
        is_safe = numbers.random() > course.accident_share * len(_ACCIDENTS)
        if why := _lost_to(swapped, batch, "" if is_safe else numbers.choice(_ACCIDENTS), numbers):
            lost_to[why] += 1
        else:
            plain(batch).square().mean().backward()
            _check_same(plain, swapped, step)
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step % _SAMPLE_STEPS == 0:
            samples.append(_sample(swapped, step))
            show(f"{samples[-1]}, lost: {dict(lost_to)}")
    survived, lost = num_steps - lost_to.total(), dict(sorted(lost_to.items()))
    out_bytes = lmswap.report(swapped).swapped_out_bytes or 0
    return Soak(num_steps, survived, lost, course.disk_faults, out_bytes, tuple(samples))


def _lost_to(model: nn.Module, batch: torch.Tensor, accident: str, numbers: random.Random) -> str:
    """Runs one step with ``accident`` in it; returns what ended it, "" if it completed."""
    engine = lmswap.api._sessions[model].engine
    try:
        with _no_memory(engine, numbers.randrange(8) if accident == "out of memory" else -1):
            output = model(batch)
            if accident == "output dropped":
                return accident
            if accident == "loss raises":
                raise UserError
            if accident in ("gradient hook raises", "Ctrl-C"):
                output.register_hook(functools.partial(_raise, Pressed if accident == "Ctrl-C" else UserError))
            if accident == "byte changed":
                _change_byte(engine, numbers)
            output.square().mean().backward()
    except (UserError, Pressed, MemoryError):
        return accident
    except LmswapError as error:
        found = re.search(r"came back|read|write", str(error))
        return {"came back": "byte changed"}.get(found[0], f"{found[0]} failed") if found else str(error)
    return ""


def _raise(error: type[BaseException], _: torch.Tensor) -> None:
    raise error


def _no_memory(engine: SwapEngine, calls_left: int) -> mock._patch[object]:
    """Patch by which a swap-in fails to allocate after ``calls_left`` that do not; none fails if it is -1."""
    in_start, left = engine.in_start, iter(range(calls_left, -2, -1))

    def take(token: torch.Tensor, buffer: int, device: torch.device) -> torch.Tensor:
        if calls_left >= 0 and next(left, None) == 0:
            raise MemoryError
        return in_start(token, buffer, device)

    return mock.patch.object(engine, "in_start", take)


def _change_byte(engine: SwapEngine, numbers: random.Random) -> None:
    """Changes one byte of the swap file, found through /proc; it may or may not be read later."""
    nbytes = engine.native.tier_stats("disk").capacity_bytes
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.is_file() and link.stat().st_size == nbytes > 0 == link.stat().st_nlink:
            with link.open("r+b", buffering=0) as file:
                place = file.seek(numbers.randrange(nbytes))
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1]))


def _check_same(plain: nn.Module, swapped: nn.Module, step: int) -> None:
    for name, expected in plain.named_parameters():
        actual = swapped.get_parameter(name)
        if not torch.equal(actual, expected) or not torch.equal(actual.grad, expected.grad):  # type: ignore[arg-type]
            raise AssertionError(f"step {step}: '{name}' has other bits than the plain model's")


def _sample(model: nn.Module, step: int) -> Sample:
    gc.collect()
    engine = lmswap.api._sessions[model].engine
    engine.reap_finished_transfers()
    engine.recorder.last()
    tier = engine.native.tier_stats("disk")
    sample = Sample(
        step=step,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        open_files=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        live_handles=engine.native.live_handles(),
        tier_used_bytes=tier.used_bytes,
        held_tensors=len(engine._in_flight),
    )
    if (sample.live_handles, sample.tier_used_bytes, sample.held_tensors) != (0, 0, 0):
        raise AssertionError(f"something is left behind: {sample}")
    return sample


def main(argv: Sequence[str] | None = None) -> int:
    """Soaks, and writes what came of it; 0, 2 if that cannot be written, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--course", choices=list(COURSES), default="faults")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/soak_cpu.json, or soak_large_cpu.json")
    options = parser.parse_args(argv)
    return run_to_end("soak", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    result = soak(options.steps, seed=options.seed, course=options.course)
    record = {"machine": asdict(study.describe_machine()), "seed": options.seed, **asdict(result)}
    file = options.output or RESULTS / ("soak_cpu.json" if options.course == "faults" else "soak_large_cpu.json")
    write_text(file, json.dumps(record, indent=1) + "\n")
    first, last = result.samples[0], result.samples[-1]
    print_result(
        f"{result.survived} of {result.steps} steps survived, bitwise equal; lost: {result.lost_to}\n"
        f"resident {first.resident_bytes / _MIB:.1f} -> {last.resident_bytes / _MIB:.1f} MiB, "
        f"files {first.open_files} -> {last.open_files}, threads {first.threads} -> {last.threads}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
