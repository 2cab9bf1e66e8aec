"""Sums of whole numbers, which do not round, over four ranks in two nodes of two: what a rank sees of them.

In a file of its own, as each process imports it.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.distributed.reduction import all_reduce_fused, all_reduce_hierarchical, hierarchical_hook, make_nodes


def sum_in_ways(rank, world, folder):
    """Compares sums of whole numbers, which do not round, in two nodes of two."""
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    nodes, seen = make_nodes(2), []
    for num in (1, 2, 5, 4096):
        mine = torch.arange(num).float() * (rank + 1)
        flat, stages = mine.clone(), mine.clone()
        dist.all_reduce(flat)
        all_reduce_hierarchical(stages, nodes)
        seen.append(torch.equal(flat, stages) and torch.equal(flat, torch.arange(num).float() * 10))
    for limit_bytes in (1, 40, 10_000):
        tensors = [torch.full(shape, float(rank + len(shape))) for shape in ((3,), (2, 5), (), (7, 1, 2))]
        all_reduce_fused(tensors, lambda flat: all_reduce_hierarchical(flat, nodes), limit_bytes)
        seen.append(all(torch.equal(t, torch.full_like(t, 6.0 + 4 * t.ndim)) for t in tensors))
    found = []
    for hook in (None, hierarchical_hook):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(7, 5, bias=False))
        if hook is not None:
            model.register_comm_hook(nodes, hook)
        (model(torch.full((2, 7), 4.0 * rank)).sum()).backward()  # of which a fourth is whole
        found.append(model.module.weight.grad)
    seen.append(torch.equal(*found) and found[0].any().item())
    Path(f"{folder}/{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()
