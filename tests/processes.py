"""Processes that train together: how tests start some, and wait until they have ended."""

import contextlib
import gc
import os
import resource
import time
from collections.abc import Iterator

import torch
import torch.multiprocessing as mp

from tools.emulated_gpu import machine


def start(target, world, *args):
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, world, *args), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def take_gpu(rank, world):
    """Gives this process the GPU of its rank, an emulated one where they are: it has all that names no device."""
    if machine.is_built():
        os.environ["EMULATED_GPU_DEVICES"] = str(world)
        machine.start()
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")


def give_back_memory():
    """What came before in this process holds none of the GPU's: cycles hold arenas, torch's allocator what is free."""
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def limited(which: int, amount: int) -> Iterator[None]:
    """This process may take no more than ``amount`` of a resource."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def take_violations():
    """What this process did wrong on the emulated GPU, if it has one."""
    return machine.take_violations() if machine.is_started() else []


def end(processes, seconds):
    """Their exit codes; None of those that had not ended by then."""
    latest = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, latest - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes
