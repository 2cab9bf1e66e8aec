"""The rank of this process, and its device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed.alarm import alarmed
from benchmarks.unet3d.brats import DataError
from lmswap.hardware.mkl_init import initialize_mkl

_TIMEOUT = timedelta(minutes=10)  # of a collective: the first step of a rank may capture and plan for minutes

_STORE_TIMEOUT = timedelta(minutes=5)  # until the last rank has joined


@dataclass(frozen=True)
class Ranks:
    """This process: ``rank`` of ``size``, among those of its machine ``local_rank`` of ``local_size``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of each rank, by rank, on all ranks."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def share(self, model: nn.Module) -> DistributedDataParallel:
        """``model`` as all ranks train it together."""
        device_ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def first(self, make: Callable[[], object]) -> None:
        """Calls ``make`` in one process of each machine, while the others wait."""
        if self.local_rank == 0:
            make()
        distributed.barrier()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the processes that torchrun started: NCCL and a GPU for each where there are any, else gloo.

    Raises:
        DataError: torchrun did not start this process, or there are fewer GPUs than ranks on this machine.
    """
    if "RANK" not in os.environ:
        raise DataError("start it by `torchrun -m`, or by `python -m benchmarks.distributed`, which starts torchrun")
    rank, size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    device = torch.device("cpu")
    if num_gpus := torch.cuda.device_count():
        if local_size > num_gpus:
            raise DataError(f"{local_size} ranks on a machine with {num_gpus} GPU(s): NCCL wants one for each")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    initialize_mkl()
    backend = "nccl" if num_gpus else "gloo"
    store = _connect("group")
    gpu = device if num_gpus else None
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=gpu)
    with alarmed(_connect("alarm"), rank, size):
        yield Ranks(rank, size, local_rank, local_size, device, backend)
        distributed.destroy_process_group()


def _connect(name: str) -> distributed.Store:
    """The store that torchrun keeps for all ranks; what an earlier attempt left in it is not seen.

    torchrun 2.13 keeps one store over its restarts, and torch's own way of joining reads there where the peers of an
    attempt before listened: of the first two restarts that were tried so, one waited for ever.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT)
    return distributed.PrefixStore(f"{name}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
