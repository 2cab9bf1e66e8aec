"""Everything that decides how lmswap will run here, gathered in one go; what cannot be had is said, not raised."""

from __future__ import annotations

from dataclasses import dataclass

from lmswap.errors import LmswapError
from lmswap.hardware.device import DeviceInfo, default_device, describe_device
from lmswap.hardware.disk import Directory, describe_directory, swap_directory
from lmswap.hardware.link import HostLink
from lmswap.hardware.measure import describe_machine, host_link
from lmswap.hardware.ram import Ram, read_ram
from lmswap.ir.machine import Machine


@dataclass(frozen=True)
class Survey:
    """The machine as `lmswap doctor` shows it.

    ``machines`` holds the device with one tier each, by the tier's name, preferred tier first; ``failures`` says why a
    tier is missing there. ``num_devices`` counts visible GPUs; only the first is measured.
    """

    device: DeviceInfo
    num_devices: int
    link: HostLink
    ram: Ram
    directory: Directory | None
    machines: dict[str, Machine]
    failures: dict[str, str]


def survey(disk_directory: str | None = None) -> Survey:
    """Looks at the default device, its link and its tiers, and measures them anew; takes one to six seconds."""
    import torch

    device = default_device()
    machines: dict[str, Machine] = {}
    failures: dict[str, str] = {}
    for tier in ("disk",) if device.type == "cpu" else ("host", "disk"):
        try:
            machines[tier] = describe_machine(device, tier, disk_directory, refresh=True)
        except LmswapError as error:
            failures[tier] = str(error)
    return Survey(
        device=describe_device(device),
        num_devices=torch.cuda.device_count(),
        link=host_link(device),
        ram=read_ram(),
        directory=describe_directory(swap_directory(disk_directory)) if "disk" in machines else None,
        machines=machines,
        failures=failures,
    )
