"""The process that torchrun starts in tests of the recipe `efficiency`, with a model that takes no time."""

import sys

import torch

from benchmarks.distributed import efficiency
from benchmarks.peers.tasks import Task
from tests.benchmarks.distributed.faulty_training import Network

if __name__ == "__main__":
    task = Task(lambda: Network(2), lambda: (torch.zeros(1, 3, 64, 64),), ())
    efficiency.MODELS["small"]["unet3d"] = efficiency.Model("tiny", task)
    sys.exit(efficiency.main())
