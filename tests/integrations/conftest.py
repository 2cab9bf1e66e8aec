"""Settings for the tests with other libraries, which warn of their own affairs."""

import pytest
import torch

from lmswap import api

_compile = torch.compile


@pytest.fixture(autouse=True)
def own_graphs():
    """The network is the same in all tests, with other batches: torch would take their size for a varying one."""
    torch.compiler.reset()


@pytest.fixture
def enabled():
    """Says which sessions that this test began still run; those of other tests may not have been collected yet."""
    before = {*api.sessions()}
    return lambda: {*api.sessions()} - before


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "integrations":
            item.add_marker(pytest.mark.filterwarnings("ignore", "error::lmswap.errors.NotManaged"))


def pytest_collection_finish():
    """Lightning, once imported, has its own in the place of `torch.compile`, for all tests of this process."""
    torch.compile = _compile
