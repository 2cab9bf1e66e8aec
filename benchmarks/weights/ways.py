"""The ways to run a model whose weights exceed the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lmswap
from benchmarks.needs import Needs
from benchmarks.weights.outcomes import LMSWAP, PLAIN
from benchmarks.weights.paced_file import PacedFile, Stored
from benchmarks.weights.tasks import Task
from benchmarks.weights.window import Copies, FromFile, FromPinned, Window, frozen, spread
from lmswap.ir.emulation import EmulatedLink


@dataclass(frozen=True)
class Limits:
    """What a way may use: lmswap gets the budget, the others the number of blocks that they move.

    ``bytes_per_second`` is the rate of copies in; None: the machine's own.
    """

    device: torch.device
    budget_bytes: int | None = None
    bytes_per_second: float | None = None
    num_blocks: int = 0


@dataclass(frozen=True)
class Applied:
    """What a step needs to know: ``end_step`` is called after each, ``read_bytes`` returns those so far."""

    end_step: Callable[[], None] = lambda: None
    read_bytes: Callable[[], int] | None = None


@dataclass(frozen=True)
class Way(Needs):
    """``apply`` changes a model on the host so that it runs on the device; ``moves_blocks``: as many as it is given."""

    apply: Callable[[nn.Module, Task, Limits], Applied]
    moves_blocks: bool = False


def _plain(model: nn.Module, task: Task, limits: Limits) -> Applied:
    model.to(limits.device)
    return Applied(read_bytes=lambda: 0)


def _lmswap(model: nn.Module, task: Task, limits: Limits) -> Applied:
    rate = limits.bytes_per_second
    link = EmulatedLink(rate, rate) if rate is not None else None
    assert limits.budget_bytes is not None
    lmswap.enable(model, limits.budget_bytes, device=str(limits.device), weights="swap", link=link)
    return Applied()


def _block_swap(model: nn.Module, task: Task, limits: Limits) -> Applied:
    """Move blocks, spread evenly, through two slots."""
    copies: Copies = FromPinned() if limits.bytes_per_second is None else FromFile(limits.bytes_per_second)
    window = Window(spread(task.blocks(model), limits.num_blocks), copies, limits.device)
    model.to(limits.device)
    return Applied(window.end_step, lambda: copies.read_bytes)


class _StoredWeights(Mapping[str, Tensor]):
    """A module's weights as accelerate's hooks take them: read whole, at the rate, at each access."""

    def __init__(self, weights: dict[str, Any], file: PacedFile | None, counts: list[int]) -> None:
        self._weights, self._file, self._counts = weights, file, counts

    def __getitem__(self, name: str) -> Tensor:
        stored = self._weights[name]
        self._counts[0] += stored.nbytes
        if self._file is None:
            return stored  # type: ignore[no-any-return]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._file.read(stored, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _accelerate(model: nn.Module, task: Task, limits: Limits) -> Applied:
    """The hooks of ``disk_offload`` and ``cpu_offload`` on the modules of as many blocks as needed."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-not-found]  # noqa: PLC0415

    rate, counts = limits.bytes_per_second, [0]
    file = PacedFile(rate) if rate is not None else None

    def stored(weight: nn.Parameter) -> Stored | Tensor:
        return weight.detach() if file is None else file.store(weight)

    for block in spread(task.blocks(model), limits.num_blocks):
        moved = {id(weight) for weight in frozen(block)}
        for module in [*block.modules()]:
            own = dict(module.named_parameters(recurse=False))
            if own and moved.issuperset(id(each) for each in own.values() if each.ndim > 1) and _is_frozen(own):
                weights = {name: stored(weight) for name, weight in own.items()}
                hook = AlignDevicesHook(limits.device, offload=True, weights_map=_StoredWeights(weights, file, counts))
                add_hook_to_module(module, hook)
    _move_rest(model, limits.device)
    return Applied(read_bytes=lambda: counts[0])


def _is_frozen(own: Mapping[str, nn.Parameter]) -> bool:
    return not any(parameter.requires_grad for parameter in own.values())


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move ordinary parameters that are on the host; others have been taken over by a library."""
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu":
            parameter.data = parameter.data.to(device)


def _fully_shard(model: nn.Module, task: Task, limits: Limits) -> Applied:
    """FSDP2's CPU offload with one rank, of as many blocks as needed; what is trained is left out, and stays."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    blocks = spread(task.blocks(model), limits.num_blocks)
    moved = {id(weight) for block in blocks for weight in frozen(block)}
    ignored = {parameter for parameter in model.parameters() if id(parameter) not in moved}
    for module in (*blocks, model):  # the model as the root, which lets blocks prefetch each other
        fully_shard(module, reshard_after_forward=True, offload_policy=CPUOffloadPolicy(), ignored_params=ignored)
    _move_rest(model, limits.device)
    return Applied()


WAYS = {
    PLAIN: Way(_plain),
    LMSWAP: Way(_lmswap),
    "block swap": Way(_block_swap, moves_blocks=True),
    "accelerate": Way(_accelerate, moves_blocks=True, package="accelerate"),
    "fully_shard": Way(_fully_shard, moves_blocks=True, needs_cuda=True),
}
