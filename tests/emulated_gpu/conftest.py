"""The emulated machine, for the tests of itself."""

import pytest

from tests.emulated_gpu import machine


@pytest.fixture(autouse=True)
def emulated_gpu():
    """The machine, as it is from the start when a test begins."""
    if not machine.is_built():
        pytest.skip("no emulated GPU in this environment: make test-gpu")
    machine.start()
    capacity_bytes = machine.capacity_bytes()
    yield machine
    machine.mend()
    machine.configure()
    machine.set_capacity(capacity_bytes)
