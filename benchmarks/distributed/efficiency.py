"""Measures what ranks cost each other: ``torchrun --nproc-per-node 2 -m benchmarks.distributed.efficiency``.

In turns all ranks take a step under a budget each for itself, one that sums gradients, and sample what sums take alone
and beside compute. From these parts the simulator says how long the step with sums is, and that of more ranks. All
train the same batch, so that weights stay equal when nothing is summed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn

import lmswap
from benchmarks.distributed.conductor import Turns
from benchmarks.distributed.entry import measure, recipe_parser
from benchmarks.distributed.prediction.network import Network
from benchmarks.distributed.prediction.predict import RanksStep, predict_ranks
from benchmarks.distributed.prediction.ranks import Ranks as SimulatedRanks
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.results import Efficiency, Prediction, Results, describe_origin
from benchmarks.distributed.sums import SumProbe
from benchmarks.peers.tasks import TASKS, Task
from benchmarks.programs.models import Bottleneck, Gpt, TransformerBlock, resnet50
from benchmarks.unet3d.commands.arguments import positive
from benchmarks.unet3d.network import DecoderLevel, EncoderLevel, UNet3d
from lmswap.hardware.device import default_device
from lmswap.reporting.report import Report
from lmswap.session.plan_file import PinnedPlans

MAX_RANKS = 256
TURNS = 8
BUDGET = "60%"  # of what the step's tensors take unplanned, if none is given
WARM_UP_STEPS = 5  # lmswap captures and measures in the first, and plans again until the fourth


@dataclass(frozen=True)
class Model:
    """A trained model and its name in tables."""

    title: str
    task: Task


def _words(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, 1024, (batch, tokens + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


MODELS = {
    "small": {
        "unet3d": Model(
            "3D U-Net, 48³", Task(UNet3d, lambda: (torch.randn(1, 4, 48, 48, 48),), (EncoderLevel, DecoderLevel))
        ),
        "resnet50": Model(
            "ResNet-50, 32 x 80 x 80", Task(resnet50, lambda: (torch.randn(32, 3, 80, 80),), (Bottleneck,))
        ),
        "gpt": Model(
            "GPT, 4 layers",
            Task(
                lambda: Gpt(layers=4, width=384, heads=6, tokens=128, words=1024),
                lambda: _words(8, 128),
                (TransformerBlock,),
            ),
        ),
    },
    "full": {
        "unet3d": Model("3D U-Net, 192³", TASKS["full"]["unet3d"]),
        "resnet50": Model("ResNet-50, 64 x 224 x 224", TASKS["full"]["resnet50"]),
        "gpt": Model("GPT-2 medium, 8 x 1024", TASKS["full"]["gpt"]),
    },
}
NAMES = tuple(MODELS["full"])
SIZES = {"cpu": "small", "cuda": "full"}  # if none is given


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as one of the ranks that torchrun started; 0 if all of them finished."""
    parser = recipe_parser("efficiency", __doc__, add_arguments)
    parser.add_argument("--model", choices=NAMES, default="unet3d", help="(%(default)s)")
    parser.add_argument("--turns-port", type=int, metavar="PORT", help="of a store that says when this group's turn is")
    arguments = parser.parse_args(argv)
    return measure(partial(_measure, arguments=arguments), arguments.record)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what to measure, and how often."""
    size = SIZES[default_device().type]
    parser.add_argument("--size", choices=MODELS, default=size, help="of models and batches (%(default)s)")
    parser.add_argument("--turns", type=positive, default=TURNS, metavar="N", help="that are timed (%(default)s)")


def _measure(ranks: Ranks, *, arguments: argparse.Namespace) -> Results:
    model = MODELS[arguments.size][arguments.model]
    training = _Training(ranks, model.task, arguments.budget or BUDGET)
    probe = SumProbe(ranks) if ranks.size > 1 else None
    turns = Turns(ranks, arguments.turns_port)
    turns.tell_budget(training.report().budget_bytes)
    alone: list[float] = []
    together: list[float] = []
    for turn in range(arguments.turns):
        turns.wait()
        ways = [(training.step_alone, alone), (training.step_together, together)]
        for step, seconds in ways if turn % 2 else reversed(ways):
            seconds.append(max(ranks.gather(_timed(step))))
        if probe is not None:
            probe.sample()
    network = probe.network() if probe is not None else None
    predicted, report = training.predict(network), training.report()
    point = Efficiency(
        name=model.title,
        ranks=ranks.size,
        has_cores=ranks.local_size * torch.get_num_threads() <= len(os.sched_getaffinity(0)),
        budget_bytes=report.budget_bytes,
        swapped_bytes=report.swapped_out_bytes,
        alone_seconds=tuple(alone),
        together_seconds=tuple(together),
        network=network,
        predicted=predicted[0],
        larger=tuple(predicted[1:]),
    )
    training.end()
    return Results("efficiency", describe_origin(ranks), efficiencies=(point,))


def _timed(step: Callable[[], None]) -> float:
    """Seconds of ``step`` on this rank; all ranks begin it together."""
    distributed.barrier()
    begun = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


class _Training:
    """A network under a budget that this rank trains for itself, or with the others."""

    def __init__(self, ranks: Ranks, task: Task, budget: str) -> None:
        """Enables lmswap and warms up, with and without all-reduce."""
        torch.manual_seed(0)
        with ranks.device:
            self._network, self._batch = task.make_model(), task.make_batch()
        self._ranks, self._task = ranks, task
        lmswap.enable(self._network, budget=budget)
        self._shared = ranks.share(self._network)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=1e-4)
        for _ in range(WARM_UP_STEPS):
            self.step_together()
        self.step_alone()

    def step_together(self) -> None:
        """Runs one step with all-reduce of its gradients."""
        self._step(self._shared)

    def step_alone(self) -> None:
        """Runs one step without all-reduce."""
        self._step(self._network)

    def _step(self, model: nn.Module) -> None:
        self._task.loss(model(*self._batch)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def report(self) -> Report:
        """The report of the last step."""
        return lmswap.report(self._network)

    def predict(self, network: Network | None) -> list[Prediction]:
        """Of these ranks, and of twice as many and so on, each of whose machines is like this one.

        Messages between machines take as long as those here, which go through the kernel's TCP as well.
        """
        if network is None:
            return [Prediction(1, 0.0, 0.0, 0.0)]
        between = replace(network, between_nodes=network.within_node)
        found, count = [], self._ranks.size
        while count <= MAX_RANKS:
            found.append(_prediction(self._simulate(SimulatedRanks(count, between))))
            count *= 2
        return found

    def _simulate(self, ranks: SimulatedRanks) -> RanksStep:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            lmswap.save_plan(self._network, path)
            pinned = PinnedPlans.read(str(path))
        program, planned = pinned.steps[-1]
        limits = {"tier": pinned.options.tier, "min_swap_bytes": pinned.options.min_swap_bytes}
        return predict_ranks(planned.plan, program, planned.costs, planned.machine, ranks, **limits)

    def end(self) -> None:
        """Disables lmswap and frees its memory."""
        lmswap.disable(self._network)


def _prediction(step: RanksStep) -> Prediction:
    bound = step.certificate
    return Prediction(
        ranks=step.ranks.count,
        all_reduce_seconds=step.all_reduce_seconds,
        extra_seconds=step.seconds - step.alone_seconds,
        unhidden_seconds=max(0.0, bound.seconds - bound.alone.seconds),
    )


if __name__ == "__main__":
    sys.exit(main())
