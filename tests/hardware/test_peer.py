"""The peer that holds swapped tensors: the one with the fastest link among those with enough memory."""

import pynvml
import pytest
import torch

from lmswap.errors import DriverError, OptionError, TierError
from lmswap.hardware import peer
from lmswap.hardware.link import has_nvlink

GIB = 2**30
DEVICE = torch.device("cuda", 1)


@pytest.fixture
def node(monkeypatch):
    """Four GPUs; what is free of each, and how long copies take there."""

    def make(free, seconds=None):
        def free_bytes(name):
            if isinstance(free[name], Exception):
                raise free[name]
            return free[name]

        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        monkeypatch.setattr(peer, "free_bytes", free_bytes)
        monkeypatch.setattr(peer, "round_trip_seconds", lambda _device, _tier, name: seconds[name])

    return make


def test_the_one_that_is_reached_fastest_is_taken(node):
    node({"cuda:0": 9 * GIB, "cuda:2": 2 * GIB, "cuda:3": 5 * GIB}, {"cuda:0": 0.2, "cuda:2": 0.1, "cuda:3": 0.4})
    assert peer.find_peer(DEVICE) == "cuda:2"


def test_of_those_that_are_reached_as_fast_the_emptiest_is_taken(node):
    node({"cuda:0": 2 * GIB, "cuda:2": 3 * GIB, "cuda:3": 9 * GIB}, {"cuda:0": 0.1, "cuda:2": 0.11, "cuda:3": 0.2})
    assert peer.find_peer(DEVICE) == "cuda:2"


def test_peers_without_enough_memory_are_not_measured(node):
    node({"cuda:0": 2 * GIB, "cuda:2": DriverError("out of memory"), "cuda:3": 5 * GIB})
    assert peer.find_peer(DEVICE, needed_bytes=3 * GIB) == "cuda:3"


def test_the_error_states_the_free_bytes_of_each_gpu(node):
    node({"cuda:0": 2 * GIB, "cuda:2": DriverError("no room for a context"), "cuda:3": GIB})
    with pytest.raises(
        TierError, match=r"has 3\.00 GiB free: cuda:2 .*context; cuda:0 has 2\.00 GiB; cuda:3 has 1\.00 GiB"
    ):
        peer.find_peer(DEVICE, needed_bytes=3 * GIB)


def test_a_requested_peer_is_never_replaced(node):
    node({"cuda:0": 9 * GIB, "cuda:2": GIB, "cuda:3": 5 * GIB}, {"cuda:0": 0.1, "cuda:2": 0.9, "cuda:3": 0.2})
    assert peer.find_peer(DEVICE, "cuda:2") == "cuda:2"
    with pytest.raises(TierError, match=r"cuda:2 has 1\.00 GiB"):
        peer.find_peer(DEVICE, "cuda:2", needed_bytes=3 * GIB)
    for name in ("cuda:1", "cuda:4"):
        with pytest.raises(OptionError, match=f"another GPU than cuda:1: cuda:0, cuda:2, cuda:3, not {name}"):
            peer.find_peer(DEVICE, name)


class Nvml:
    """Two GPUs of which the driver says whether NVLink connects them."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK

    def __init__(self, status):
        self.status = status

    def nvmlDeviceGetP2PStatus(self, one, other, capability):  # noqa: N802
        assert (one, other, capability) == ("gpu", "other", self.NVML_P2P_CAPS_INDEX_NVLINK)
        return self.status


@pytest.mark.parametrize(
    ("status", "is_linked"), [(pynvml.NVML_P2P_STATUS_OK, True), (pynvml.NVML_P2P_STATUS_NOT_SUPPORTED, False)]
)
def test_nvlink_between_two_gpus_is_read_from_the_driver(status, is_linked):
    assert has_nvlink(Nvml(status), "gpu", "other") is is_linked
