"""Known machines, by what their driver answers."""

from types import SimpleNamespace

import pynvml
import pytest

from lmswap.hardware.link import find_gpu, read_host_link
from tests.hardware.fake_nvml import FakeNvml, nvlinks, pcie

GPU, IBMNPU, SWITCH = (getattr(pynvml, f"NVML_NVLINK_DEVICE_TYPE_{name}") for name in ("GPU", "IBMNPU", "SWITCH"))
COUNT, STATUS, MAX_BW = (
    getattr(pynvml, f"NVML_FI_DEV_C2C_LINK_{name}") for name in ("COUNT", "GET_STATUS", "GET_MAX_BW")
)

H200 = FakeNvml(
    {
        **nvlinks([SWITCH] * 18, version=4),
        **pcie(5, 16),
    },
    fields={(COUNT, 0): 0},
)
AC922 = FakeNvml({**nvlinks([IBMNPU] * 3 + [GPU] * 3, version=2), **pcie(3, 2)})
OLD_DRIVER_AC922 = FakeNvml(
    {
        "nvmlDeviceGetNvLinkState": dict.fromkeys(range(6), 1),
        "nvmlDeviceGetNvLinkVersion": dict.fromkeys(range(6), 2),
        # PCI identities of IBM's bridge and of a V100: device in the high half, vendor in the low one.
        "nvmlDeviceGetNvLinkRemotePciInfo": {
            link: SimpleNamespace(pciDeviceId=0x04EA1014 if link < 2 else 0x1DB510DE) for link in range(6)
        },
    }
)
GH200 = FakeNvml(
    pcie(5, 16),
    fields={
        (COUNT, 0): 10,
        **{(STATUS, link): int(link != 7) for link in range(10)},
        **{(MAX_BW, link): 45_000 for link in range(10)},
    },
)
VIRTUAL_MACHINE = FakeNvml()
GEN3 = FakeNvml(pcie(3, 16), fields={})
THROTTLED = FakeNvml(pcie(1, 8, max_generation=4, max_width=16))
FUTURE = FakeNvml(pcie(9, 16))


@pytest.mark.parametrize(
    ("machine", "kind", "description", "gigabytes_per_second"),
    [
        (H200, "pcie", "PCIe gen5 x16", 63.0),  # its 18 NVLinks lead to switches, not to the host
        (AC922, "nvlink", "NVLink to the CPU, 3 links", 75.0),
        (OLD_DRIVER_AC922, "nvlink", "NVLink to the CPU, 2 links", 50.0),
        (GH200, "c2c", "NVLink-C2C to the CPU, 9 links", 405.0),  # one of ten is down
        (VIRTUAL_MACHINE, "unknown", "unknown: the driver does not report it", 0.0),
        (GEN3, "pcie", "PCIe gen3 x16", 15.8),
        (THROTTLED, "pcie", "PCIe gen1 x8 (of gen4 x16 possible)", 2.0),
        (FUTURE, "pcie", "PCIe gen9 x16", 0.0),  # named, its rate not guessed
    ],
)
def test_the_link_to_the_host_is_named(machine, kind, description, gigabytes_per_second):
    link = read_host_link(machine, "gpu")
    assert (link.kind, link.description) == (kind, description)
    assert link.bytes_per_second / 1e9 == pytest.approx(gigabytes_per_second, rel=0.01)


@pytest.mark.parametrize(
    "refused", ["nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkWidth"]
)
def test_one_refused_call_does_not_hide_the_others(refused):
    answers = {name: answer for name, answer in H200.answers.items() if name != refused}
    assert read_host_link(FakeNvml(answers, H200.fields), "gpu").kind == "pcie"


def names_only(*uuids):
    """NVML, as far as it knows devices by their names."""

    def by_uuid(uuid):
        if uuid not in uuids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: f"the GPU of {handle}",
    )


def test_an_instance_of_a_divided_gpu_has_the_link_of_the_whole():
    assert find_gpu(names_only("GPU-1"), "1") == "GPU-1"
    assert find_gpu(names_only("MIG-1"), "1") == "the GPU of MIG-1"
    with pytest.raises(pynvml.NVMLError):
        find_gpu(names_only("GPU-2"), "1")
