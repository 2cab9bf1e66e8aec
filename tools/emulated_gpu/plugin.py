"""A pytest plugin, -p tools.emulated_gpu.plugin: runs tests on the emulated GPU; a violation fails its test."""

import os

import pytest
import torch

from tools.emulated_gpu import machine


def pytest_configure() -> None:
    if not machine.is_built():
        raise pytest.UsageError("no emulated GPU in this environment: make test-gpu builds one")
    os.environ.setdefault("EMULATED_GPU_DEVICES", "4")  # a peer to swap to; four processes train together
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # of 128 KiB, where budgets of tests are small
    machine.start()


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
