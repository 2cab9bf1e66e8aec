"""Buckets are those that DistributedDataParallel makes of the same gradients."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _compute_bucket_assignment_by_size

from benchmarks.distributed.prediction.ddp_buckets import fill_buckets
from tests.ir.build import build

MIB = 2**20


def backward(sizes):
    """A step that makes a gradient of each of these sizes, one an op."""
    names = [f"g{number}" for number in range(len(sizes))]
    ops = "\n".join(f"b{number} 1: a t -> {name}" for number, name in enumerate(names))
    text = f"forward\nf 1: x -> a y\nbackward\n{ops}"
    return build(text, sizes=dict(zip(names, sizes, strict=True)), outputs="y", tangents="t", gradients=" ".join(names))


@given(
    st.lists(st.sampled_from([4, MIB - 4, MIB, 12 * MIB, 24 * MIB, 25 * MIB - 4, 40 * MIB]), min_size=1, max_size=12)
)
def test_gradients_fill_the_buckets_of_torch(sizes):
    tensors = [torch.empty(nbytes // 4, device="meta") for nbytes in sizes]
    expected, _ = _compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    found = fill_buckets(backward(sizes).program)
    assert [bucket.nbytes for bucket in found] == [sum(sizes[number] for number in bucket) for bucket in expected]
    assert [bucket.last for bucket in found] == [1 + max(bucket) for bucket in expected]


def test_a_bucket_spans_graphs_and_waits_for_its_last_gradient():
    step = build(
        """
        forward 0
        f0 1: x -> a y
        forward 1
        f1 1: y -> b z
        backward 1
        b1 1: b t -> g1
        c1 1: b t -> h1
        backward 0
        b0 1: a u -> g0
        c0 1: a u -> d
        """,
        sizes={"g1": MIB, "h1": MIB, "g0": 25 * MIB},
        outputs="y z",
        tangents="t u",
        gradients="g1 h1 g0",
    )
    assert [(bucket.nbytes, bucket.last) for bucket in fill_buckets(step.program)] == [(MIB, 2), (26 * MIB, 4)]


def test_a_gradient_that_is_added_to_is_made_by_the_last_addition():
    step = build(
        "forward\nf 1: x -> a y\nbackward\nb 1: a t -> g\nc 1: a t -> h\nd 1: g h -> g",
        sizes={"g": MIB, "h": 2 * MIB},
        outputs="y",
        tangents="t",
        gradients="g h",
    )
    assert [(bucket.nbytes, bucket.last) for bucket in fill_buckets(step.program)] == [(2 * MIB, 2), (MIB, 3)]
