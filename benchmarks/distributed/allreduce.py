"""Times ways to sum over ranks: ``torchrun --nproc-per-node 4 -m benchmarks.distributed.allreduce``.

Flat, and in three stages by nodes; tensors of several sizes, and the gradients of ResNet-50 one by one and fused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed

from benchmarks.distributed.entry import measure, recipe_parser
from benchmarks.distributed.ranks import Ranks
from benchmarks.distributed.reduction import (
    Nodes,
    Reduce,
    all_reduce_flat,
    all_reduce_fused,
    all_reduce_hierarchical,
    make_nodes,
)
from benchmarks.distributed.results import Reduction, Results, describe_origin
from benchmarks.programs.models import resnet50
from benchmarks.unet3d.commands.arguments import positive

SIZES_BYTES = {"cpu": (2**12, 2**16, 2**20, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
REPEATS = 7

Sum = Callable[[list[Tensor]], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as one of the ranks that torchrun started; 0 if all of them finished."""
    arguments = recipe_parser("allreduce", __doc__, add_arguments, has_budget=False).parse_args(argv)
    return measure(partial(_compare, per_node=arguments.ranks_per_node), arguments.record)


def _compare(ranks: Ranks, *, per_node: int | None) -> Results:
    nodes = make_nodes(per_node or _ranks_per_node(ranks))
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)

    def draw(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=generator, device=ranks.device)

    by_nodes: Reduce = partial(all_reduce_hierarchical, nodes=nodes)
    ways: dict[str, Sum] = {"flat": _each(all_reduce_flat), "hierarchical": _each(by_nodes)}
    found: list[Reduction] = []
    for nbytes in SIZES_BYTES[ranks.device.type]:
        found += _Comparison(ranks, nodes, [draw([nbytes // 4])]).of(ways)
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in resnet50().parameters()]
    fused: dict[str, Sum] = {
        "flat, fused": partial(all_reduce_fused, reduce=all_reduce_flat),
        "hierarchical, fused": partial(all_reduce_fused, reduce=by_nodes),
    }
    found += _Comparison(ranks, nodes, list(map(draw, shapes))).of({**ways, **fused})
    return Results("allreduce", describe_origin(ranks), reductions=tuple(found))


def _each(reduce: Reduce) -> Sum:
    """The sum that reduces one tensor after the other."""

    def sum_up(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            reduce(tensor)

    return sum_up


@dataclass(frozen=True)
class _Comparison:
    """The same tensors summed in several ways; the first of them is what the others are compared with."""

    ranks: Ranks
    nodes: Nodes
    tensors: list[Tensor]

    def of(self, ways: Mapping[str, Sum]) -> list[Reduction]:
        """Measures all ways in turns, so that each sees the same load of a shared machine; a result per way."""
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        sums: dict[str, list[Tensor]] = {}
        for _ in range(REPEATS):
            for name, way in ways.items():
                sums[name], took = self._time(way)
                seconds[name].append(took)
        first = next(iter(sums.values()))
        return [
            Reduction(
                way=name,
                ranks=self.ranks.size,
                per_node=self.nodes.per_node,
                tensors=len(self.tensors),
                nbytes=sum(tensor.nbytes for tensor in self.tensors),
                seconds=max(self.ranks.gather(statistics.median(seconds[name][1:]))),  # the first makes connections
                difference=max(self.ranks.gather(_difference(sums[name], first))),
            )
            for name in ways
        ]

    def _time(self, way: Sum) -> tuple[list[Tensor], float]:
        copies = [tensor.clone() for tensor in self.tensors]
        distributed.barrier()
        _wait(self.ranks)
        begun = time.perf_counter()
        way(copies)
        _wait(self.ranks)
        return copies, time.perf_counter() - begun


def _difference(sums: list[Tensor], others: list[Tensor]) -> float:
    largest = max(tensor.abs().max().item() for tensor in others)
    return max((a - b).abs().max().item() for a, b in zip(sums, others, strict=True)) / largest


def _ranks_per_node(ranks: Ranks) -> int:
    """Ranks of a node: those of a machine, or half of them if there is only one machine."""
    is_one_machine = ranks.local_size == ranks.size
    return ranks.size // 2 if is_one_machine and ranks.size % 2 == 0 else ranks.local_size


def _wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the measurement."""
    parser.add_argument(
        "--ranks-per-node", type=positive, metavar="N", help="taken for a node; default: a machine's, of one half"
    )


if __name__ == "__main__":
    sys.exit(main())
