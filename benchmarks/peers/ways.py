"""Ways to reduce a model's memory: lmswap's policies, and those of other libraries, each as its users call it.

The others know no byte budget. Those that have a dial are turned to the budget's percentage, those that have none run
once; what matters is where they come out in peak and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.needs import Needs
from benchmarks.peers.tasks import Task
from lmswap.runtime.codegen import compile_boxed

Call = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Peer(Needs):
    """Another way: ``apply(model, task, percent)`` is a context that gives what to call instead of the model."""

    apply: Callable[[nn.Module, Task, int], Any]
    has_dial: bool = False

    def runs_on(self, device: str) -> bool:
        """Whether this way is available on ``device``, "cpu" or "cuda"."""
        return self.refusal(device) is None


@contextmanager
def _eager(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    yield model


@contextmanager
def _checkpoint(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    """torch.utils.checkpoint around the first blocks, 100 - ``percent`` of a hundred."""
    blocks = [module for module in model.modules() if isinstance(module, task.blocks)]
    for block in blocks[: round(len(blocks) * (100 - percent) / 100)]:
        _checkpoint_block(block)
    yield model


def _checkpoint_block(block: nn.Module) -> None:
    inner = block.forward

    def forward(*inputs: Any) -> Any:
        return checkpoint(inner, *inputs, use_reentrant=False)

    block.forward = forward


@contextmanager
def _memory_budget(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    """PyTorch's partitioner, set to save ``percent`` of the bytes; its graphs run as lmswap's do, without Inductor."""
    compiler = aot_autograd(fw_compiler=_run_boxed, partition_fn=min_cut_rematerialization_partition)
    with config.patch(activation_memory_budget=percent / 100):
        yield torch.compile(model, backend=compiler, dynamic=False)


def _run_boxed(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    function = compile_boxed(module)

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _save_on_cpu(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    with save_on_cpu(pin_memory=True):
        yield model


@contextmanager
def _torchtune(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    from torchtune.training import OffloadActivations  # noqa: PLC0415

    def call(*batch: torch.Tensor) -> torch.Tensor:
        with OffloadActivations():
            output: torch.Tensor = model(*batch)
        return output

    yield call


@contextmanager
def _ao_offload(model: nn.Module, task: Task, percent: int) -> Iterator[Call]:
    """PyTorch's own offloading of what the forward graph saves, all that it marks, on a stream of its own."""

    def partition(joint: torch.fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        for node in joint.graph.nodes:
            value = node.meta.get("val")
            node.meta["should_offload"] = isinstance(value, torch.Tensor) and value.numel() >= 2**18
        return min_cut_rematerialization_partition(joint, inputs, **rest)

    compiler = aot_autograd(fw_compiler=_run_boxed, partition_fn=partition)
    with config.patch(enable_activation_offloading=True, activation_offload_separate_stream=True):
        yield torch.compile(model, backend=compiler, dynamic=False)


PEERS = {
    "eager": Peer(_eager),
    "torch.checkpoint": Peer(_checkpoint, has_dial=True),
    "torch.memory_budget": Peer(_memory_budget, has_dial=True),
    "torch.save_on_cpu": Peer(_save_on_cpu, needs_cuda=True),
    "torch.ao_offload": Peer(_ao_offload, needs_cuda=True),
    "torchtune": Peer(_torchtune, needs_cuda=True, package="torchtune"),
}
