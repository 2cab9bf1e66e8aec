"""Given rates of the emulated GPU as lmswap's measurements, which would take minutes on a CPU."""

import json
import os
from pathlib import Path

import torch

from lmswap.hardware import measure
from lmswap.ir.machine import Machine


def store_as_measured(machine: Machine, folder: Path) -> None:
    """Puts ``machine`` into the cache that this process keeps in ``folder`` from now on, as if it had been measured."""
    os.environ["LMSWAP_CACHE_DIR"] = str(folder)
    (tier,) = machine.tiers
    measure._cache_file(torch.device("cuda", 0), tier.name, "").write(json.loads(machine.to_json()))
