"""Collectives of the emulated NCCL give what their definitions say, in an order that streams keep."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.processes import end, start, take_gpu, take_violations
from tools.emulated_gpu import machine

WORLD, COUNT = 3, 300_001  # more bytes than go at once, and no multiple of anything
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
REDUCTIONS = {
    "SUM": lambda given: given.sum(0, dtype=given.dtype),
    "PRODUCT": lambda given: given.prod(0, dtype=given.dtype),
    "MAX": lambda given: given.max(0).values,
    "MIN": lambda given: given.min(0).values,
}


def given(dtype):
    """What each rank has: small whole numbers, whose sums and products every type holds."""
    numbers = torch.arange(WORLD * COUNT, device="cpu").remainder(3).reshape(WORLD, COUNT) + 1
    return numbers.to(dtype)


def differing(rank):
    """Which collectives gave something else."""
    wrong = []

    def check(name, found, expected):
        if not torch.equal(found.cpu(), expected):
            wrong.append(name)

    for dtype in DTYPES:
        all_given = given(dtype)
        own = all_given[rank].cuda()
        for reduction, of in REDUCTIONS.items():
            dist.all_reduce(found := own.clone(), op=getattr(dist.ReduceOp, reduction))
            check(f"all_reduce {reduction} {dtype}", found, of(all_given))
        dist.reduce(found := own.clone(), dst=1)
        check(f"reduce {dtype}", found, REDUCTIONS["SUM"](all_given) if rank == 1 else all_given[rank])
        dist.broadcast(found := own.clone(), src=2)
        check(f"broadcast {dtype}", found, all_given[2])
        dist.all_gather_into_tensor(found := own.new_empty(WORLD * COUNT), own)
        check(f"all_gather {dtype}", found.reshape(WORLD, COUNT), all_given)
        whole = all_given.flatten().roll(rank).cuda()
        dist.reduce_scatter_tensor(found := own.new_empty(COUNT), whole)
        rolled = torch.stack([all_given.flatten().roll(other) for other in range(WORLD)])
        check(f"reduce_scatter {dtype}", found, REDUCTIONS["SUM"](rolled).reshape(WORLD, COUNT)[rank])
    dist.all_reduce(found := torch.full((COUNT,), float(rank), device="cuda"), op=dist.ReduceOp.AVG)
    check("all_reduce AVG", found, torch.ones(COUNT, device="cpu"))
    return wrong


def out_of_order(rank):
    """What several streams, each late in its turn, get out of one communicator after the other."""
    wrong, streams = [], [torch.cuda.Stream() for _ in range(3)]
    machine.configure(jitter_seconds=0.002)
    for number in range(30):
        with torch.cuda.stream(streams[(number + rank) % 3]):  # other ones on each rank
            dist.all_reduce(found := torch.full((COUNT,), float(number), device="cuda"))
            if not (found == WORLD * number).all():
                wrong.append(number)
    torch.cuda.synchronize()
    return wrong


def run(rank, world, folder):
    take_gpu(rank, world)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    reported = {"differing": differing(rank), "out_of_order": out_of_order(rank)}
    dist.destroy_process_group()
    reported["violations"] = take_violations()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(reported))


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    assert end(start(run, WORLD, str(folder)), seconds=400) == [0] * WORLD
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("what", ["differing", "out_of_order", "violations"])
def test_collectives_of_any_type_size_and_stream_are_correct(reported, what):
    assert [rank[what] for rank in reported] == [[]] * WORLD
