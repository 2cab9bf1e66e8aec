"""Ranks that train together over NCCL: what they hold, and what is left when one of them dies."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import lmswap
from tests.processes import end, start, take_gpu
from tools.emulated_gpu import machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2 and not machine.is_built(), reason="two ranks want a GPU each"),
]
_TIMEOUT = timedelta(seconds=15)


def die_within(rank, world, folder):
    """The last rank dies in the third backward; the errors of the others go to a file."""
    reported = os.open(f"{folder}/reported-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(reported, 2)
    take_gpu(rank, world)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    network, swapped = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), Path(folder) / f"swapped-{rank}"
    swapped.mkdir()
    lmswap.enable(
        network, policy="swap_all", budget="1GiB", tier="disk", min_swap_bytes=64, disk_directory=str(swapped)
    )
    model, steps = DDP(network), Path(folder) / f"steps-{rank}"

    def dies(_):
        if rank == world - 1 and steps.exists() and steps.read_text() == "2":
            os._exit(7)

    network[1].weight.register_hook(dies)
    for step in range(1, 6):
        model(torch.randn(256, 64)).square().mean().backward()
        torch.cuda.synchronize()
        assert lmswap.report(network).swapped_out_bytes > 0
        steps.write_text(str(step))


@pytest.mark.slow  # NCCL's watchdog takes a minute to end a process
def test_ranks_end_within_the_timeout_when_one_dies_in_mid_step(tmp_path):
    assert end(start(die_within, 2, str(tmp_path)), seconds=300) == [-signal.SIGABRT, 7]  # NCCL's watchdog ends a rank
    assert (tmp_path / "steps-0").read_text() == "2"
    assert "Watchdog caught collective operation timeout" in (tmp_path / "reported-0").read_text()
    assert [*(tmp_path / "swapped-0").iterdir()] == [*(tmp_path / "swapped-1").iterdir()] == []


def train_within(rank, world, folder, budget_bytes):
    """A few steps under DistributedDataParallel, whose buckets are rebuilt after the first; writes down the peak."""
    take_gpu(rank, world)
    store = dist.FileStore(f"{folder}/store-{budget_bytes}", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh()))
    network = nn.Sequential(*layers, nn.Linear(1024, 4))
    if budget_bytes:
        lmswap.enable(network, policy="swap", budget=budget_bytes)
    model = DDP(network)
    optimizer, batches = torch.optim.Adam(model.parameters()), []
    for _ in range(4):
        batches[:] = [torch.randn(8192, 1024)]
        model(batches[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (Path(folder) / f"{budget_bytes}-{rank}").write_text(f"{torch.cuda.max_memory_reserved()}")
    dist.destroy_process_group()


@pytest.mark.slow  # a step of GPUs' sizes, on a CPU
def test_rebuilt_buckets_are_within_the_budget(tmp_path):
    def peak_bytes(budget_bytes):
        assert end(start(train_within, 2, str(tmp_path), budget_bytes), seconds=300) == [0, 0]
        return max(int((tmp_path / f"{budget_bytes}-{rank}").read_text()) for rank in range(2))

    budget_bytes = int(0.8 * peak_bytes(0))
    assert peak_bytes(budget_bytes) <= budget_bytes
