"""The emulated machine, for the tests of itself; where there is none, there is nothing to test."""

import pytest
import torch

from tools.emulated_gpu import machine

collect_ignore_glob = [] if machine.is_built() else ["test_*.py"]


@pytest.fixture(autouse=True)
def emulated_gpu():
    """The machine, as it is from the start when a test begins."""
    machine.start()
    capacity_bytes = machine.capacity_bytes()
    yield machine
    machine.mend()
    machine.configure()
    machine.configure_compute()
    machine.configure_peers()
    machine.configure_queues()
    machine.configure_kernels()
    machine.ignore_waits_of_the_driver(False)
    for device in range(torch.cuda.device_count()):
        machine.set_capacity(capacity_bytes, device)
