"""In deterministic mode torch fills the memory that it allocates, but not the memory that bytes are swapped into."""

import math

import torch
from torch import nn

import lmswap


def numbers_filled(policy):
    """How many a step writes in advance into memory that torch allocates in deterministic mode."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()), torch.ones(2**12, 64)
    lmswap.enable(model, policy=policy, min_swap_bytes=4096)
    for _ in range(4):
        model(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model(x).sum().backward()
    moved_bytes = lmswap.report(model).swapped_out_bytes
    lmswap.disable(model)
    filled = (event.input_shapes[0] for event in profile.events() if event.name == "aten::fill_")
    return sum(math.prod(shape) for shape in filled), moved_bytes


def test_swapped_tensors_are_not_filled_before_their_bytes_arrive():
    torch.use_deterministic_algorithms(True)
    try:
        (unswapped, _), (swapped, moved_bytes) = numbers_filled("none"), numbers_filled("swap_all")
    finally:
        torch.use_deterministic_algorithms(False)
    assert moved_bytes > 0
    assert unswapped == swapped
