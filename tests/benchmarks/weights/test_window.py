"""Block swap: plain torch's bits from two slots, each copy counted, and a broken one reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.weights import ways
from benchmarks.weights.outcomes import Run, Steps
from benchmarks.weights.paced_file import PacedFile
from benchmarks.weights.run import block_bytes
from benchmarks.weights.tasks import NAMES, make_task
from benchmarks.weights.training import train
from benchmarks.weights.window import FromFile, Window, spread

PLAIN = Run("decoder", "tiny", None, "plain", "cpu", steps=Steps(2, 1, 1))
SWAPPED = replace(PLAIN, way="block swap", bytes_per_second=1e9, num_blocks=4)


@pytest.mark.parametrize("name", NAMES)
def test_block_swap_has_the_bits_of_plain_torch(name):
    expected, found = (train(replace(run, task=name)) for run in (PLAIN, SWAPPED))
    assert (expected.status, found.status) == ("ran", "ran"), found.detail
    assert (found.bits, found.trained) == (expected.bits, expected.trained)
    assert len(set(found.bits)) == 4
    # A backward begins with the two blocks that are there, and so does the next step.
    num_copies = 2 * (4 - 2) if name == "decoder" else 4
    assert found.read_bytes == num_copies * block_bytes(replace(PLAIN, task=name))[0]


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_blocks_that_fit_the_slots_are_copied_once(num_blocks):
    found = train(replace(SWAPPED, num_blocks=num_blocks))
    assert (found.bits, found.read_bytes) == (train(PLAIN).bits, 0)


def test_blocks_are_spread_evenly():
    assert spread([0, 1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread([0, 1, 2], 3) == [0, 1, 2]


def test_a_copy_of_wrong_bytes_shows_in_the_bits(monkeypatch):
    def read(self, stored, target):
        read_right(self, stored, target)
        target.view(-1)[0] += 1

    read_right = PacedFile.read
    monkeypatch.setattr(PacedFile, "read", read)
    assert train(SWAPPED).bits != train(PLAIN).bits


def test_a_way_that_breaks_is_an_outcome(monkeypatch):
    def broken(model, task, limits):
        raise RuntimeError("no such device")

    monkeypatch.setitem(ways.WAYS, "block swap", replace(ways.WAYS["block swap"], apply=broken))
    found = train(SWAPPED)
    assert (found.status, found.detail) == ("failed", "RuntimeError: no such device")


def test_another_order_of_blocks_is_refused():
    model = make_task("decoder", "tiny", None).make_model()
    window = Window(model.layers, FromFile(1e9), torch.device("cpu"))
    x = torch.zeros(1, 4, 256)
    model.layers[0](x)
    window.end_step()
    with pytest.raises(RuntimeError, match="block 1 is used where block 0 was in the first step"):
        model.layers[1](x)


def test_files_are_read_as_written():
    file, tensors = PacedFile(1e9), [torch.arange(5.0), torch.arange(6, dtype=torch.bfloat16).view(2, 3)]
    stored = [file.store(tensor) for tensor in tensors]
    for tensor, each in zip(tensors, stored, strict=True):
        target = torch.empty(each.shape, dtype=each.dtype)
        file.read(each, target)
        assert torch.equal(target, tensor)
