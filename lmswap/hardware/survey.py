"""Survey of the machine for `lmswap doctor` and `links`; unavailable tiers are reported, not raised."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lmswap.errors import LmswapError
from lmswap.hardware.device import DeviceInfo, default_device, describe_device
from lmswap.hardware.disk import Directory, describe_directory
from lmswap.hardware.host_memory import HostMemory, read_host_memory
from lmswap.hardware.link import HostLink
from lmswap.hardware.measure import describe_machine, host_link, locate_tier, tiers_to_try
from lmswap.hardware.peer import describe_peer
from lmswap.ir.machine import Machine


@dataclass(frozen=True)
class Survey:
    """The machine as `lmswap doctor` shows it.

    ``machines`` holds the device with one tier each, by the tier's name, preferred tier first; ``failures`` has the
    reasons for missing tiers. ``num_devices`` counts visible GPUs; only the first is measured. ``peer`` describes the
    GPU of its peer tier and the path of copies. ``load`` is what ran or waited to run before, on average over a minute.
    """

    device: DeviceInfo
    num_devices: int
    link: HostLink
    ram: HostMemory
    directory: Directory | None
    peer: str | None
    machines: dict[str, Machine]
    failures: dict[str, str]
    load: float = 0.0


def survey(disk_directory: str | None, *, with_device_tier: bool = False) -> Survey:
    """Measures the default device, its link and its tiers, ignoring the cache; takes one to ten seconds.

    ``with_device_tier``: of a GPU also its spare memory, over which links can be emulated.
    """
    import torch

    device, load = default_device(), os.getloadavg()[0]
    machines: dict[str, Machine] = {}
    failures: dict[str, str] = {}
    places: dict[str, str] = {}
    for tier in (*tiers_to_try(device), *["device"] * (with_device_tier and device.type == "cuda")):
        try:
            places[tier] = locate_tier(device, tier, disk_directory if tier == "disk" else None)
            machines[tier] = describe_machine(device, tier, places[tier], refresh=True)
        except LmswapError as error:
            failures[tier] = str(error)
    return Survey(
        device=describe_device(device),
        num_devices=torch.cuda.device_count(),
        link=host_link(device),
        ram=read_host_memory(),
        directory=describe_directory(places["disk"]) if "disk" in machines else None,
        peer=describe_peer(device, places["peer"]) if "peer" in machines else None,
        machines=machines,
        failures=failures,
        load=load,
    )
