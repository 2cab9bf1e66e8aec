"""The emulated GPU: an H200 behind PCIe gen5, all of whose rates are slower by one factor.

The ratios of computing, memory and link decide what plans look like, and how long copies are beside what hides them. At
a real GPU's rates a CPU's kernels would be late. Latencies are slowed by less: networks are smaller here by as much as
the device is slower, and a launch is to be the same small part of a step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from lmswap.hardware.launch_overhead import measure_host
from lmswap.ir.machine import Link, Machine, Rate, Tier
from tools.emulated_gpu import machine
from tools.emulated_gpu.measured import store_as_measured

_LIKE = Path(__file__).parents[1] / "programs" / "machines" / "h200_gen5.json"
SLOWER = 4000.0
_LATENCIES_SLOWER = 50.0


def slowed() -> Machine:
    """The emulated machine: the H200 with all rates divided by one factor."""
    like = Machine.from_json(_LIKE.read_text())
    fast = like.tier("host").link.out_rate
    rate = Rate.constant(fast.bytes_per_second / SLOWER, fast.seconds(1) * _LATENCIES_SLOWER)
    return replace(
        like,
        name=f"emulated: {like.name}, {SLOWER:.0f} times slower",
        device_bytes=machine.capacity_bytes(),
        flops_per_second=like.flops_per_second / SLOWER,
        bytes_per_second=like.bytes_per_second / SLOWER,
        op_seconds=like.op_seconds * _LATENCIES_SLOWER,
        tiers=(Tier("host", 2**34, Link(rate, rate)),),
    )


def start(cache: Path) -> Machine:
    """Starts the emulated GPU in this process and caches its rates as if measured; returns the machine."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # of 128 KiB, as the networks are small
    machine.start()
    made = replace(slowed(), host=measure_host(torch.device("cuda", 0), "host", ""))
    (tier,) = made.tiers
    rate, latency_seconds = tier.link.out_rate.bytes_per_second, tier.link.out_rate.seconds(1)
    machine.configure(out_rate=rate, in_rate=rate, latency_seconds=latency_seconds)
    machine.configure_compute(
        flop_rate=made.flops_per_second, memory_rate=made.bytes_per_second, latency_seconds=made.op_seconds
    )
    store_as_measured(made, cache)
    return made
