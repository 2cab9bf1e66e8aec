"""The emulated GPU in every Python process of a command: this folder in PYTHONPATH, the repository behind it."""

from pathlib import Path

from lmswap.ir.machine import Link, Machine, Rate, Tier
from tools.emulated_gpu import machine
from tools.emulated_gpu.measured import store_as_measured

_CACHE = Path(__file__).parents[3] / "build" / "emulated_gpu" / "cache"
_LINK_RATE = 2e9  # bytes per second each way, which a core copies without effort
_LINK = Link(Rate.constant(_LINK_RATE), Rate.constant(_LINK_RATE))

machine.start()
machine.configure(out_rate=_LINK_RATE, in_rate=_LINK_RATE)
store_as_measured(
    Machine("Emulated GPU", machine.capacity_bytes(), 50e9, 10e9, 1e-5, (Tier("host", 2**34, _LINK),)), _CACHE
)
