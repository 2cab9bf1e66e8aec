"""What does a swap cost the host? Calls of the driver: the difference of steps with more and with fewer swaps."""

from collections import Counter

import pytest
import torch
from torch import nn

import lmswap

KIB = 2**10
NUM_STEPS = 4


def chain() -> nn.Module:
    """Saves what each layer gives: by turns 64 KiB and 16."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 128), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


def counted(machine, min_swap_bytes, *, compiler="fx", late_seconds=0.0) -> tuple[Counter[str], float]:
    """Driver calls of some steps, and their number of swaps: copies out."""
    torch.compiler.reset()
    model = lmswap.enable(chain(), policy="swap_all", compiler=compiler, min_swap_bytes=min_swap_bytes)
    x = torch.ones(128, 128, device="cuda")
    for _ in range(10):  # some are planned, timed, planned again and watched
        model(x).sum().backward()
    torch.cuda.synchronize()
    machine.configure(latency_seconds=late_seconds)
    with machine.counted_calls() as calls:
        for _ in range(NUM_STEPS):
            model(x).sum().backward()
    torch.cuda.synchronize()
    machine.configure()
    lmswap.disable(model)
    of_driver = Counter({symbol: number for symbol, number in calls.items() if not symbol.startswith("cuda")})
    return of_driver, of_driver["cuMemcpyDtoHAsync_v2"]


@pytest.mark.parametrize("compiler", ["fx", "eager"])
@pytest.mark.parametrize("late_seconds", [0.0, 0.002])
def test_a_swap_takes_few_driver_calls(compiler, late_seconds, emulated_gpu):
    options = {"compiler": compiler, "late_seconds": late_seconds}
    many, num_many = counted(emulated_gpu, 4 * KIB, **options)
    few, num_few = counted(emulated_gpu, 32 * KIB, **options)
    assert num_few < num_many
    many.subtract(few)
    calls = {symbol: number / (num_many - num_few) for symbol, number in many.items() if number}
    assert sum(calls.values()) <= 12, calls
