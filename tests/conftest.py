"""Settings for all tests."""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from lmswap.hardware import measure
from lmswap.hardware.disk import swap_directory
from lmswap.ir.machine import Link, Machine, Rate, Tier

# A busy machine is not a wrong result. Each run draws other examples, and `make fuzz` many.
settings.register_profile("lmswap", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lmswap")


@pytest.fixture(autouse=True, scope="module")
def what_was_there_is_no_garbage():
    """Many tests ask for a collection, which took up to a second where it looked through all of torch and its tools.

    For each module anew: tracing imports more and more.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def kernels_of_this_run(tmp_path_factory):
    """Inductor compiles each kernel once for all tests and what they start, and finds none of earlier runs."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        yield


@pytest.fixture(autouse=True, scope="session")
def machine_of_all_tests(tmp_path_factory):
    """Tests, and what they start, find this one measured: how fast the real one is depends on what else it does.

    Nothing is read from the user's cache or written to it.
    """
    device, directory, link = torch.device("cpu"), swap_directory(), Link(Rate.constant(1e9), Rate.constant(1e9))
    machine = Machine("cpu of the tests", 2**34, 50e9, 10e9, 1e-6, (Tier("disk", 2**34, link),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMSWAP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        measure._cache_file(device, "disk", directory).write(json.loads(machine.to_json()))
        yield


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Each test plans for itself."""
    for plan in Path(os.environ["LMSWAP_CACHE_DIR"]).glob("plan-*.json"):
        plan.unlink()


@pytest.fixture
def no_garbage():
    """What tests before this one left in cycles is collected now, not while this one counts memory."""
    gc.collect()
