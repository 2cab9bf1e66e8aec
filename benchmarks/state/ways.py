"""The ways to train a model whose parameters, gradients and optimizer state exceed the budget.

accelerate has none of its own: its hooks move weights of inference, and its training offload is ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import lmswap
from benchmarks.needs import Needs
from benchmarks.state.moved import MovedState
from benchmarks.state.tasks import Task
from benchmarks.weights.outcomes import LMSWAP, PLAIN
from lmswap.ir.emulation import EmulatedLink


@dataclass(frozen=True)
class Limits:
    """What a way may use: lmswap the budget, others as many parts of the state as they move.

    ``bytes_per_second`` is the rate of copies, each way; None: the machine's own.
    """

    device: torch.device
    budget_bytes: int | None = None
    bytes_per_second: float | None = None
    num_parts: int = 0


@dataclass(frozen=True)
class Applied:
    """What a step needs: the optimizer, and ``update`` in place of its step where it is another.

    ``read_bytes`` returns the bytes that were copied in so far; in the context ``whole`` all state can be read.
    """

    optimizer: Optimizer
    update: Callable[[], object] | None = None
    read_bytes: Callable[[], int] | None = None
    whole: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Way(Needs):
    """``apply`` makes the optimizer of a model on the host, and changes both so that they run on the device.

    ``moves_blocks``: as many parts of the state as it is given. ``is_saved``: saved and loaded on the way; the others
    do not have plain torch's bits anyway.
    ``remark`` names what differs from plain torch.
    """

    apply: Callable[[nn.Module, Task, Limits], Applied]
    moves_blocks: bool = False
    is_saved: bool = False
    remark: str = ""


def _optimizer(model: nn.Module, task: Task) -> Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return task.optimizer(trained, **task.settings)


def _plain(model: nn.Module, task: Task, limits: Limits) -> Applied:
    optimizer = _optimizer(model.to(limits.device), task)
    return Applied(optimizer, read_bytes=lambda: 0)


def _lmswap(model: nn.Module, task: Task, limits: Limits) -> Applied:
    optimizer, rate = _optimizer(model, task), limits.bytes_per_second
    link = EmulatedLink(rate, rate) if rate is not None else None
    assert limits.budget_bytes is not None
    lmswap.enable(model, limits.budget_bytes, optimizer=optimizer, device=str(limits.device), weights="swap", link=link)
    return Applied(optimizer)


def _moved(model: nn.Module, task: Task, limits: Limits) -> Applied:
    optimizer = _optimizer(model.to(limits.device), task)
    state = MovedState(optimizer, limits.num_parts, limits.bytes_per_second)
    return Applied(optimizer, state.step, lambda: state.read_bytes, state.whole)


def _torchao(model: nn.Module, task: Task, limits: Limits) -> Applied:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]  # noqa: PLC0415

    trained = [parameter for parameter in model.to(limits.device).parameters() if parameter.requires_grad]
    # Without gradients, whose offload permits no accumulation.
    optimizer = CPUOffloadOptimizer(trained, task.optimizer, **task.settings)
    return Applied(optimizer)


def _bitsandbytes(model: nn.Module, task: Task, limits: Limits) -> Applied:
    from bitsandbytes import optim  # type: ignore[import-not-found]  # noqa: PLC0415

    kinds = {Adam: optim.PagedAdam32bit, AdamW: optim.PagedAdamW32bit}
    if task.optimizer not in kinds:
        raise NotImplementedError(f"bitsandbytes has no paged {task.optimizer.__name__}")
    trained = [parameter for parameter in model.to(limits.device).parameters() if parameter.requires_grad]
    optimizer = kinds[task.optimizer](trained, **task.settings)
    return Applied(optimizer)


def _fully_shard(model: nn.Module, task: Task, limits: Limits) -> Applied:
    """FSDP2's CPU offload with one rank: parameters, gradients and state on the host, and CPU Adam."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    blocks = [module for module in model.modules() if isinstance(module, task.blocks)]
    for module in (*blocks, model):  # the model as the root, which lets blocks prefetch each other
        fully_shard(module, reshard_after_forward=True, offload_policy=CPUOffloadPolicy())
    optimizer = _optimizer(model, task)
    return Applied(optimizer)


WAYS = {
    PLAIN: Way(_plain, is_saved=True),
    LMSWAP: Way(_lmswap, is_saved=True),
    "moved state": Way(_moved, moves_blocks=True, is_saved=True, remark="without overlap; saved and loaded whole"),
    "torchao": Way(
        _torchao,
        needs_cuda=True,
        package="torchao",
        remark="updates on the CPU; clipping has no effect, as gradients are copied before it",
    ),
    "bitsandbytes": Way(
        _bitsandbytes,
        needs_cuda=True,
        package="bitsandbytes",
        remark="its own kernel; state in managed memory, which the peak does not count",
    ),
    "fully_shard": Way(_fully_shard, needs_cuda=True, remark="updates on the CPU; all parameters move"),
}
