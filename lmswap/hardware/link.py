"""The link of a GPU to the host or to another GPU, from NVML: C2C, else NVLink, else PCIe, else unknown.

It is informative; plans use measured rates only. NVLinks to other GPUs and to switches are not a link to the
host: an HGX H200 has 18 of them and still swaps over PCIe. Any call may be refused (virtual machines, vGPU); the
result is then "unknown", never a guess.

Order and interpretation of the fields as in NCCL (src/graph/xml.cc, src/graph/topo.cc) and the NVML reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_IBM_VENDOR = 0x1014
_NVLINK_BYTES_PER_SECOND = {1: 20e9, 2: 25e9}  # per link and direction; only POWER8 and POWER9 had NVLink to the CPU
# Per lane and direction, after line coding (8b/10b, 128b/130b, gen 6: FLIT).
_PCIE_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# c_nvmlValue_t is a union; nvmlValueType_t selects the member.
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True)
class HostLink:
    """``kind`` is "c2c", "nvlink", "pcie" or "unknown"; ``bytes_per_second`` the raw rate each way, 0 if unknown."""

    kind: str
    description: str
    bytes_per_second: float = 0.0


def find_gpu(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU with CUDA's ``uuid``; for a MIG instance, that of the whole GPU.

    Raises:
        nvml.NVMLError: NVML finds neither.
    """
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))


def read_host_link(nvml: Any, handle: Any) -> HostLink:
    """The host link of the GPU ``handle``; to be called while a copy runs, as an idle PCIe link drops its speed."""
    return (
        _c2c(nvml, handle)
        or _nvlink_to_cpu(nvml, handle)
        or _pcie(nvml, handle)
        or HostLink("unknown", "unknown: the driver does not report it")
    )


def has_nvlink(nvml: Any, handle: Any, peer: Any) -> bool:
    """Whether two GPUs are connected by NVLink, or by switches of it.

    Raises:
        nvml.NVMLError: the driver does not report it.
    """
    status = nvml.nvmlDeviceGetP2PStatus(handle, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _c2c(nvml: Any, handle: Any) -> HostLink | None:
    (count,) = _fields(nvml, handle, [nvml.NVML_FI_DEV_C2C_LINK_COUNT])
    megabytes = []
    for link in range(int(count or 0)):
        wanted = [(nvml.NVML_FI_DEV_C2C_LINK_GET_STATUS, link), (nvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW, link)]
        status, max_megabytes = _fields(nvml, handle, wanted)
        if status == 1:
            megabytes.append(max_megabytes or 0)
    if not megabytes:
        return None
    plural = "" if len(megabytes) == 1 else "s"
    return HostLink("c2c", f"NVLink-C2C to the CPU, {len(megabytes)} link{plural}", 1e6 * sum(megabytes))


def _nvlink_to_cpu(nvml: Any, handle: Any) -> HostLink | None:
    rates = [
        _NVLINK_BYTES_PER_SECOND.get(_query(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, link) or 0, 0.0)
        for link in _active_nvlinks(nvml, handle)
        if _leads_to_cpu(nvml, handle, link)
    ]
    if not rates:
        return None
    return HostLink("nvlink", f"NVLink to the CPU, {len(rates)} link{'' if len(rates) == 1 else 's'}", sum(rates))


def _active_nvlinks(nvml: Any, handle: Any) -> Iterator[int]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _query(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) == 1:
            yield link


def _leads_to_cpu(nvml: Any, handle: Any, link: int) -> bool:
    remote = _query(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if remote is not None:
        return bool(remote == nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU)
    # Older drivers report the remote end's PCI id instead; its low half is the vendor.
    pci = _query(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return pci is not None and pci.pciDeviceId & 0xFFFF == _IBM_VENDOR


def _pcie(nvml: Any, handle: Any) -> HostLink | None:
    generation = _query(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    width = _query(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    if not generation or not width:
        return None
    most = (
        _query(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or generation,
        _query(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or width,
    )
    running = f"PCIe gen{generation} x{width}"
    if most != (generation, width):
        running += f" (of gen{most[0]} x{most[1]} possible)"
    return HostLink("pcie", running, width * _PCIE_LANE_BYTES_PER_SECOND.get(generation, 0.0))


def _query(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of an NVML query; None if the driver refuses it."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _fields(nvml: Any, handle: Any, wanted: list[Any]) -> list[float | None]:
    """Field values; None for each that the driver refuses: every field has its own status."""
    values = _query(nvml, nvml.nvmlDeviceGetFieldValues, handle, wanted)
    if values is None:
        return [None] * len(wanted)
    return [
        getattr(value.value, _VALUE_MEMBERS[value.valueType]) if value.nvmlReturn == nvml.NVML_SUCCESS else None
        for value in values
    ]
