"""The ways to train a model whose parameters, gradients and optimizer state exceed the budget.

accelerate has none of its own: its hooks move weights of inference, and its training offload is ``fully_shard``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

import lmswap
from benchmarks.needs import Needs
from benchmarks.state.moved import MovedState
from benchmarks.state.tasks import Task
from benchmarks.weights.outcomes import LMSWAP, PLAIN
from lmswap.ir.emulation import EmulatedLink

MAX_NORM = 1.0  # of gradients


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
    """What a step needs: the optimizer; ``update``, ``called`` and ``backward`` stand for its step, model and backward.

    ``read_bytes`` returns the bytes that were copied in so far; ``settle`` makes all state readable, after the last
    step.
    """

    optimizer: Optimizer
    update: Callable[[], object] | None = None
    read_bytes: Callable[[], int] | None = None
    settle: Callable[[], None] = lambda: None
    called: nn.Module | None = None
    backward: Callable[[Tensor], None] = Tensor.backward


@dataclass(frozen=True)
class Way(Needs):
    """``apply`` makes the optimizer of a model on the host, and changes both so that they run on the device.

    ``moves_blocks``: as many parts of the state as it is given. ``is_saved``: saved and loaded on the way, within
    the budget.
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
    return Applied(optimizer, state.step, lambda: state.read_bytes, state.fetch_all)


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


def _deepspeed(model: nn.Module, task: Task, limits: Limits) -> Applied:
    """ZeRO-Offload with one rank: gradients, state and updates on the host; it accumulates and clips by itself."""
    import deepspeed  # type: ignore[import-not-found]  # noqa: PLC0415

    one_rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(one_rank)
    base = _optimizer(model, task)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task.micro_batches,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": task.dtype == torch.bfloat16},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "reduce_bucket_size": 2**24,  # elements: by default 500 million, more than whole models
        },
        # torch's own optimizer: DeepSpeed's is compiled by CUDA's toolkit at the first use.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=base, config=config)

    def backward(loss: Tensor) -> None:
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()  # which updates after the last micro-batch

    return Applied(base, update=lambda: None, called=engine, backward=backward)


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
    "moved state": Way(_moved, moves_blocks=True, remark="without overlap"),
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
    "deepspeed": Way(
        _deepspeed, needs_cuda=True, package="deepspeed", remark="updates on the CPU, by torch's optimizer"
    ),
    "fully_shard": Way(_fully_shard, needs_cuda=True, remark="updates on the CPU; all parameters move"),
}
