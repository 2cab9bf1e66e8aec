"""Allocations of an op: the number of pieces of each size at once, and the results in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmswap.capture.op_costs.allocation_trace import trace_allocations
from lmswap.ir.costs import Piece

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB = 2**20
CUDA = torch.device("cuda", 0)


def new(mib: float) -> Tensor:
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device=CUDA)


def scratch_first() -> list[Tensor]:
    scratch = new(8)
    result = new(8)
    del scratch
    return [result]


def scratch_last() -> list[Tensor]:
    result, scratch = new(8), new(8)
    del scratch
    return [result]


def scratch_before() -> list[Tensor]:
    new(8)
    return [new(8)]


def two_results() -> list[Tensor]:
    first, second = new(8), new(8)
    return [second, first]


def of_several_sizes() -> list[Tensor]:
    scratch = [new(0.5), new(30), new(2)]
    result = new(2)
    del scratch
    return [result]


@pytest.mark.parametrize(
    ("run", "pieces"),
    [
        (scratch_first, [Piece(8 * MIB), Piece(8 * MIB, 0)]),
        (scratch_last, [Piece(8 * MIB, 0), Piece(8 * MIB)]),
        (scratch_before, [Piece(8 * MIB, 0)]),
        (two_results, [Piece(8 * MIB, 1), Piece(8 * MIB, 0)]),
        (of_several_sizes, [Piece(30 * MIB), Piece(2 * MIB), Piece(2 * MIB, 0), Piece(MIB // 2)]),
    ],
)
def test_results_and_equal_scratch_are_distinguished_by_allocation_order(
    run: Callable[[], list[Tensor]], pieces: list[Piece]
):
    assert trace_allocations(run, [], CUDA) == tuple(pieces)


def test_a_result_that_was_given_is_no_result_of_the_op():
    given = new(8)
    assert trace_allocations(lambda: [given, new(8)], [given], CUDA) == (Piece(8 * MIB, 0),)


def test_nothing_is_recorded_while_the_allocator_history_is_in_use():
    torch.cuda.memory._record_memory_history()
    try:
        assert trace_allocations(scratch_first, [], CUDA) is None
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
