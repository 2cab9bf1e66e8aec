"""Settings for all tests.

The process that hands tests out to others loads this too, and waits for what is imported here: torch is not.
"""

import gc
import json
import os
import signal
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.cases import FACTOR, IS_FUZZING

pytest_plugins = ["tests.speedups"]

# A busy machine is not a wrong result. Examples are fixed, so that a failure is the change's and not the draw's; `make
# test-all` tries more of them, and `make fuzz` draws others. What those find becomes an `@example`.
settings.register_profile(
    "lmswap",
    max_examples=10 * FACTOR,
    derandomize=not IS_FUZZING,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("lmswap"), max_examples=100)
settings.load_profile("lmswap")
if not IS_FUZZING:
    # Hypothesis 6.131 and later (6.170 too) also draw constants out of the modules that are loaded, and have no setting
    # against it: examples would depend on which tests ran before in the same process.
    providers.is_local_module_file = lambda _path: False


@pytest.fixture(autouse=True, scope="session")
def interruptible_processes():
    """Shells start background commands with SIGINT ignored, which the processes that tests start would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def folder_of_this_run(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # which the workers share


@pytest.fixture(autouse=True, scope="session")
def kernels_of_this_run(folder_of_this_run):
    """Inductor compiles each kernel once for all tests and what they start, and finds none of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder_of_this_run / "inductor"))
        yield


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tests run that name no device")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        for mark in item.iter_markers("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"on the CPU only: {mark.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that failed leaves no model enabled to the next one."""
    report = yield
    if report.failed:
        import lmswap
        from lmswap import api

        with warnings.catch_warnings(action="ignore"):  # of weights that something still holds
            for model in [*api._sessions]:
                lmswap.disable(model)
    return report


@pytest.fixture(autouse=True)
def device(request):
    """Where the test runs: tensors and modules that name no device are made there."""
    import torch

    from tests.processes import give_back_memory

    device = torch.device(request.config.getoption("--device"))
    if device.type == "cpu":
        yield device
        return
    give_back_memory()
    torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


@pytest.fixture
def tier(device):
    """Where models swap to that name no tier."""
    return "disk" if device.type == "cpu" else "host"


@pytest.fixture(autouse=True, scope="session")
def machine_of_all_tests(request, tmp_path_factory):
    """Tests, and what they start, find this one measured: how fast the real one is depends on what else it does.

    Nothing is read from the user's cache or written to it.
    """
    import torch

    from lmswap.hardware import measure
    from lmswap.hardware.disk import swap_directory
    from lmswap.ir.machine import Link, Machine, Rate, Tier

    directory = swap_directory()
    tiers = [("cpu", "disk", directory, 1e9), ("cpu", "compressed", "", 1e9), ("cpu", "host", "", 2e10)]
    if request.config.getoption("--device") == "cuda":
        tiers += [
            ("cuda:0", "host", "", 2e10),
            ("cuda:0", "disk", directory, 1e9),
            ("cuda:0", "compressed", "", 1e9),
            ("cuda:0", "device", "", 1e12),
        ]
        # Processes that train together have one each.
        tiers += [(f"cuda:{number}", "host", "", 2e10) for number in range(1, torch.cuda.device_count())]
        if torch.cuda.device_count() > 1:
            tiers += [("cuda:0", "peer", "cuda:1", 1e11), ("cuda:1", "peer", "cuda:0", 1e11)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMSWAP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for device, tier, where, rate in tiers:
            link = Link(Rate.constant(rate), Rate.constant(rate))
            machine = Machine(f"{device} of the tests", 2**34, 50e9, 10e9, 1e-6, (Tier(tier, 2**34, link),))
            measure._cache_file(torch.device(device), tier, where).write(json.loads(machine.to_json()))
        yield


@pytest.fixture(scope="session")
def emulated_driver_of_this_run(folder_of_this_run):
    from tests.emulated_driver import EmulatedDriver

    return EmulatedDriver(folder_of_this_run)


@pytest.fixture
def emulated_driver(emulated_driver_of_this_run):
    """CUDA's driver where there is none, as it is from the start."""
    yield emulated_driver_of_this_run
    emulated_driver_of_this_run.calm()


@pytest.fixture(autouse=True)
def one_margin(request, monkeypatch):
    """Steps that move nothing grow by less: by more than plans save of models as small as those of most tests."""
    from lmswap.session import budget

    if "unmoved_margin" not in request.fixturenames:
        monkeypatch.setattr(budget, "_MARGIN_UNMOVED", budget._MARGIN)


@pytest.fixture
def unmoved_margin():
    """Steps that move nothing have a smaller margin, as they have outside of tests."""


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Each test plans for itself."""
    for plan in Path(os.environ["LMSWAP_CACHE_DIR"]).glob("plan-*.json"):
        plan.unlink()


@pytest.fixture
def no_plans_from_the_cache(monkeypatch):
    """Every model is planned without cached plans."""
    monkeypatch.setattr("lmswap.session.plan_store.PlanCache.read", lambda cache, program, **_: None)


@pytest.fixture
def no_garbage():
    """What tests before this one left in cycles is collected now, not while this one counts memory."""
    gc.collect()


@pytest.fixture
def resident(no_garbage):
    """What a process gives back or takes beside tensors depends on the tests before: models of this test count none."""
    from tests.resident import memory_of_tensors

    with memory_of_tensors() as resident:
        yield resident
