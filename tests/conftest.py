"""Settings for all tests."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("lmswap", deadline=None)  # a busy machine is not a wrong result
settings.load_profile("lmswap")


@pytest.fixture(autouse=True, scope="session")
def cache_of_its_own(tmp_path_factory):
    """The machine is measured once for all tests; nothing is read from the user's cache or written to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMSWAP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Each test plans for itself."""
    for plan in Path(os.environ["LMSWAP_CACHE_DIR"]).glob("plan-*.json"):
        plan.unlink()
