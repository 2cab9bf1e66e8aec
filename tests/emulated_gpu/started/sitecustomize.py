"""The emulated GPU in every Python process of a command: this folder in PYTHONPATH, the repository behind it.

How fast it is lmswap is told, and does not measure, which would take a CPU minutes.
"""

import json
import os
from pathlib import Path

import torch

from lmswap.hardware import measure
from lmswap.ir.machine import Link, Machine, Rate, Tier
from tests.emulated_gpu import machine

_CACHE = Path(__file__).parents[3] / "build" / "emulated_gpu" / "cache"
_LINK_RATE = 2e9  # bytes per second each way, which a core copies without effort


def _tell_lmswap() -> None:
    os.environ["LMSWAP_CACHE_DIR"] = str(_CACHE)
    link = Link(Rate.constant(_LINK_RATE), Rate.constant(_LINK_RATE))
    device = torch.device("cuda", 0)
    told = Machine("Emulated GPU", machine.capacity_bytes(), 50e9, 10e9, 1e-5, (Tier("host", 2**34, link),))
    measure._cache_file(device, "host", "").write(json.loads(told.to_json()))


machine.start()
machine.configure(out_rate=_LINK_RATE, in_rate=_LINK_RATE)
_tell_lmswap()
