"""Hierarchical all-reduce of gradients in three stages, of which one crosses nodes, with many tensors as one.

Within a node a reduce-scatter leaves each rank the sum of a part; across nodes an all-reduce sums the parts of the same
place; within a node an all-gather joins them. Between nodes travels the tensor once for each node instead of once for
each rank (Jia et al. 2018, arXiv 1807.11205).
"""

# Annotations are not strings here: DistributedDataParallel wants to see the class in that of a hook.
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.nn import functional

from lmswap.errors import OptionError

FUSED_BYTES = 64 * 2**20  # at most so much becomes one tensor, unless one alone is larger

Reduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class Nodes:
    """This rank's groups: the ranks ``within`` its node, and ``across`` nodes those with its place in theirs."""

    within: distributed.ProcessGroup
    across: distributed.ProcessGroup
    per_node: int


def make_nodes(per_node: int) -> Nodes:
    """Groups ranks by nodes of ``per_node``, in the order of ranks; to be called by all of them.

    Raises:
        OptionError: ranks cannot be divided so.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    if size % per_node:
        raise OptionError(f"{size} ranks are no nodes of {per_node} each")
    nodes = [list(range(start, start + per_node)) for start in range(0, size, per_node)]
    within = [distributed.new_group(node) for node in nodes]
    across = [distributed.new_group(list(place)) for place in zip(*nodes, strict=True)]
    return Nodes(within[rank // per_node], across[rank % per_node], per_node)


def all_reduce_flat(flat: Tensor) -> None:
    """Sums a tensor over all ranks in place, as the backend does it."""
    distributed.all_reduce(flat)


def all_reduce_hierarchical(flat: Tensor, nodes: Nodes) -> None:
    """Sums a tensor of one axis over all ranks in place, in three stages."""
    padded = functional.pad(flat, (0, -len(flat) % nodes.per_node))
    parts = list(padded.chunk(nodes.per_node))
    mine = torch.empty_like(parts[0])
    distributed.reduce_scatter(mine, parts, group=nodes.within)
    distributed.all_reduce(mine, group=nodes.across)
    distributed.all_gather(parts, mine, group=nodes.within)
    flat.copy_(padded[: len(flat)])


def all_reduce_fused(tensors: Iterable[Tensor], reduce: Reduce, limit_bytes: int = FUSED_BYTES) -> None:
    """Sums tensors of one dtype in place: by ``reduce`` of their values in a row, at most ``limit_bytes`` at a time."""
    for group in fuse(tensors, limit_bytes):
        flat = torch.cat([tensor.flatten() for tensor in group])
        reduce(flat)
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(values.view_as(tensor))


def fuse(tensors: Iterable[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Neighbours that together have at most ``limit_bytes``; a larger one comes alone."""
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(member.nbytes for member in group) + tensor.nbytes > limit_bytes:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def hierarchical_hook(nodes: Nodes, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Means of a bucket over all ranks: a communication hook of DistributedDataParallel.

    The stages are queued here one after the other: stages that follow each other by callbacks would come in another
    order on other ranks, which collectives do not forgive.
    """
    gradients = bucket.buffer()
    gradients.div_(distributed.get_world_size())
    all_reduce_hierarchical(gradients, nodes)
    devices = [gradients.device] if gradients.is_cuda else None
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    done.set_result(gradients)
    return done
