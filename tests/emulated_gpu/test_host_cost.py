"""The host cost of a swap in driver calls: the difference between steps with more and fewer swaps."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

import lmswap
from lmswap.hardware.launch_overhead import measure_host
from tests.models import quick_of

KIB, MIB = 2**10, 2**20
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


def test_launch_overhead_is_measured_without_side_effects(emulated_gpu):
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_allocated(device)
    with emulated_gpu.counted_calls() as calls:
        host = measure_host(device, "host", "")
    assert min(host.op_seconds, host.copy_seconds) > 0
    assert calls["cuMemcpyDtoHAsync_v2"] == calls["cuMemcpyHtoDAsync_v2"] > 0
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.parametrize(
    ("compiler", "late_seconds"),
    quick_of(itertools.product(["fx", "eager"], [0.0, 0.002]), [("fx", 0.0), ("eager", 0.002)]),
)
def test_a_swap_takes_few_driver_calls(compiler, late_seconds, emulated_gpu):
    options = {"compiler": compiler, "late_seconds": late_seconds}
    many, num_many = counted(emulated_gpu, 4 * KIB, **options)
    few, num_few = counted(emulated_gpu, 32 * KIB, **options)
    assert num_few < num_many
    many.subtract(few)
    # What a late device adds, a poll in ten swaps, is not part of each swap.
    calls = {symbol: round(number / (num_many - num_few)) for symbol, number in many.items() if number}
    assert sum(calls.values()) <= 12, calls


def test_a_large_copy_goes_in_pieces_between_which_others_get_their_turn(emulated_gpu):
    model = lmswap.enable(nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Tanh()).cuda(), policy="swap_all")
    x = torch.ones(10 * MIB, 1, device="cuda")  # 40 MiB: a piece of 32, and the rest
    for _ in range(2):
        model(x).sum().backward()
    with emulated_gpu.counted_calls() as calls:
        model(x).sum().backward()
    num_swaps = lmswap.report(model).swapped_out_bytes // x.nbytes
    lmswap.disable(model)
    assert num_swaps > 0
    assert calls["cuMemcpyDtoHAsync_v2"] == calls["cuMemcpyHtoDAsync_v2"] == 2 * num_swaps
