"""Streaming: which swaps a window of layers leaves."""

from __future__ import annotations

import pytest

from benchmarks.whole_step.host_updates import with_host_updates
from benchmarks.whole_step.streaming import layers, streamed, stretch_ends
from lmswap.analyze.liveness import live_ranges
from lmswap.ir.program import BufferKind, Program
from tests.benchmarks.whole_step.small_steps import ADAMW, training

Times = list[tuple[int | None, int, int, int]]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Forward 0 to 5; in the backward, each layer's gradients and its update: ops 6 and 7 of layer 5 … 16 and 17."""
    return training(6, 1, monkeypatch)


def times(step: Program, name: str, slots: int) -> Times:
    buffer = step.buffer_names.index(name)
    groups = layers(step, (BufferKind.WEIGHT,), 1)
    found = streamed(step, [live_ranges(step)[buffer]], stretch_ends(step, groups), slots)
    return [(swap.out_start, swap.release, swap.in_start, swap.first_use) for swap in found]


def test_stretches_are_the_ops_of_a_layer_between_those_of_others(step: Program) -> None:
    groups = layers(step, (BufferKind.WEIGHT,), 1)
    assert [len(group) for group in groups] == [1] * 6
    assert stretch_ends(step, groups) == [1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 17]  # layer 5 has one for both directions


def test_weights_are_copied_out_after_their_update_only(step: Program) -> None:
    """Between forward and backward their host copy is valid; after the update, once the next layer has ended."""
    assert times(step, "layers.2.W", 2) == [(None, 3, 9, 12), (14, 17, 19, 20)]


def test_what_the_window_covers_over_the_step_end_stays(step: Program) -> None:
    """Updated and needed again at once, it is copied out in the forward instead; or never, if the host updates it."""
    assert times(step, "layers.0.W", 2) == [(1, 2, 13, 16)]
    frozen_in_the_step = with_host_updates(step, ADAMW, sums_on_device=False).program
    assert times(frozen_in_the_step, "layers.0.W", 2) == [(None, 1, 10, 11)]


def test_a_window_of_all_layers_covers_all_gaps(step: Program) -> None:
    assert not times(step, "layers.5.W", 12)


def test_optimizer_state_returns_in_the_next_step(step: Program) -> None:
    """Its update, at 7 and 25, follows the end of layer 5's stretch, so that it returns once layer 4's has ended."""
    assert times(step, "adamw of layers.5.W", 2) == [(8, 11, 23, 25)]
