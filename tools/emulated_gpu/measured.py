"""How fast is the emulated GPU? lmswap is told, and does not measure, which would take a CPU minutes."""

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
