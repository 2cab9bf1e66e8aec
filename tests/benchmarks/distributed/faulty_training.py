"""A training of benchmarks.distributed that torchrun starts, of a small network, in which a rank has a fault.

``torchrun -m tests.benchmarks.distributed.faulty_training FAULT ARGUMENTS``: rank 1 "dies" in mid-step of the first
attempt, has "no data", or a "full disk".
"""

import functools
import os
import signal
import sys
import types
from collections.abc import Callable

import torch
from torch import nn

import lmswap
from benchmarks.distributed import resnet50
from lmswap.runtime import _C
from lmswap.session import engine_setup

DYING_STEP = 4  # of 6; the last checkpoint is after step 3


class Network(nn.Module):
    """Whose step takes 12 tensors of 8 MiB for 4 images of 64 x 64."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 128, 1), nn.BatchNorm2d(128), nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for _ in range(10):
            x = torch.sin(x)
        return self.last(x.mean((2, 3)))


def dying(classes: int) -> nn.Module:
    network, steps = Network(classes), iter(range(DYING_STEP))

    def die(_: torch.Tensor) -> None:
        if next(steps) == DYING_STEP - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    network.last.weight.register_hook(die)
    return network


def main() -> int:
    fault, *arguments = sys.argv[1:]
    make: Callable[[int], nn.Module] = Network
    if os.environ["RANK"] == "1":
        match fault:
            case "dies" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                make = dying
            case "no-data":
                arguments[arguments.index("--data") + 1] += "-of-rank-1"
            case "full-disk":
                # Of the model's engine alone, not of those that measure; and with a plan that surely swaps.
                engine_setup._C = types.SimpleNamespace(Engine=functools.partial(_C.Engine, faults="reserve@1=fail"))
                lmswap.enable = functools.partial(lmswap.enable, policy="swap_all")
    return resnet50.main(arguments, make)


if __name__ == "__main__":
    sys.exit(main())
