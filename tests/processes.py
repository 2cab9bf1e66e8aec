"""Processes that train together: how tests start some, and wait until they have ended."""

import time

import torch.multiprocessing as mp


def start(target, world, *args):
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, world, *args), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


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
