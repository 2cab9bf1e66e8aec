"""A pytest plugin, -p tests.emulated_gpu.plugin: tests run on the emulated GPU, and fail by what they did wrong on it.

Kernels are the CPU's, so that sizes which suit a GPU are made smaller here, and nowhere else.
"""

import pytest
import torch

from lmswap.hardware import compute
from tests.emulated_gpu import machine

_SIDE = 24  # of an image to convolve while copies are measured: 128 takes 1.3 s a run here, some hundred times


def pytest_configure() -> None:
    if not machine.is_built():
        raise pytest.UsageError("no emulated GPU in this environment: make test-gpu builds one")
    machine.start()
    compute._SIDE["cuda"] = _SIDE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("real_gpu"):
            item.add_marker(pytest.mark.skip(reason=f"on a real GPU only: {mark.args[0]}"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    wrong = machine.take_violations()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        wrong.append(f"the context is broken: {str(error).splitlines()[0]}")
        machine.mend()
        torch.cuda.synchronize()
    wrong += machine.take_violations()
    if wrong:
        pytest.fail(f"{len(wrong)} violations on the emulated GPU, the first: {wrong[0]}", pytrace=False)
