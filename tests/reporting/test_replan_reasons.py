"""Each reason to replan has a sentence with its numbers."""

import pytest

from lmswap.reporting.replan_reasons import (
    AccumulatedGradients,
    CompressedExcess,
    HeldGrowth,
    InUseGrowth,
    LossExcess,
    MisplacedTensor,
    PredictionOff,
    Trigger,
    UnusedMargin,
    UnusedMemory,
    WarmUpGrowth,
)

MIB = 2**20
SENTENCES = [
    (AccumulatedGradients(), "from now on each is accumulated as it is computed"),
    (HeldGrowth(3 * MIB), "3.00 MiB more are held between steps"),
    (InUseGrowth(3 * MIB), "3.00 MiB more than before are in use between steps, beside what tensors hold"),
    (WarmUpGrowth(3 * MIB, 0), "3.00 MiB more are in use between steps than was planned for"),
    (WarmUpGrowth(3 * MIB, 5 * MIB), "fragmentation made the step take 5.00 MiB too much"),
    (MisplacedTensor(), "still held at offsets of the next one"),
    (CompressedExcess(5 * MIB, 4 * MIB), "took 5.00 MiB, more than 4.00 MiB"),
    (LossExcess(5 * MIB), "the loss takes 5.00 MiB"),
    (PredictionOff(3.0, 2.0, 0.5, "conv", 2.0, 1.0), "measured 3.00 s against 2.00 s predicted; most off is op conv: "),
    (PredictionOff(3.0, 2.0, 0.5, "conv", 1.2, 1.0), "the device waited for the host, which took 500 ms to queue"),
    (UnusedMemory(5 * MIB, 0), "the loss and the optimizer need 5.00 MiB less than was reserved for them"),
    (UnusedMemory(0, 4 * MIB), "gradients of the last step are not held for as long as they might be, which leaves 4"),
    (UnusedMemory(5 * MIB, 4 * MIB), "reserved for them; gradients of the last step"),
    (UnusedMargin(6 * MIB), "the margin can be smaller by 6.00 MiB"),
]


@pytest.mark.parametrize(("trigger", "sentence"), SENTENCES)
def test_a_trigger_is_a_sentence_with_its_numbers(trigger, sentence):
    assert sentence in str(trigger)


def test_every_trigger_has_a_sentence():
    assert {type(trigger) for trigger, _ in SENTENCES} == {*Trigger.__subclasses__()}


def test_memory_that_is_still_needed_is_not_named():
    assert "gradients" not in str(UnusedMemory(5 * MIB, 0))
    assert "reserved" not in str(UnusedMemory(0, 4 * MIB))
