"""The memory that streaming gradients take in a backward is known by op."""

from lmswap.ir.backward_parts import streamed_gradient_bytes
from tests.ir.build import build

MIB = 2**20


def test_gradients_that_stream_take_three_parts_at_most_and_nothing_of_a_forward():
    step = build(
        """
        forward
        f1 1: x -> a
        f2 1: a -> y
        backward
        b1 1: t a -> g1
        b2 1: t g1 -> h
        b3 1: h a -> g2
        b4 1: h a -> g3
        b5 1: h -> gx
        """,
        sizes={"g1": MIB, "g2": MIB // 2, "g3": MIB // 2},
        outputs="y",
        tangents="t",
        gradients="g1 g2 g3",
    )
    # The first part ends where g1 is last read, the second one with g3.
    assert streamed_gradient_bytes(step.program) == {
        step.op("b1"): MIB,  # copied in, to be added to
        step.op("b2"): MIB,
        step.op("b3"): 2 * MIB,  # g1 is copied out
        step.op("b4"): 2 * MIB + MIB // 2,  # g2 is held
        step.op("b5"): MIB,
    }
