"""A pytest plugin that makes the tests faster by changes to Python and torch; `-p no:tests.speedups` leaves it out.

Nothing that a test checks may depend on it.
"""

import gc
import logging

import pytest

# torch writes each graph out in full for every handler of this logger, and pytest attaches one.
_TRACE_LOGGER = logging.getLogger("torch.__trace")
# Of Python's collector: so seldom that collections take 4 % of the tests' time instead of 8.
_GC_THRESHOLD = (20_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    _TRACE_LOGGER.addHandler = lambda _handler: None  # type: ignore[method-assign]
    if config.getoption("hypothesis_profile") != "thorough":  # `make test-all` keeps Python's thresholds
        gc.set_threshold(*_GC_THRESHOLD)


@pytest.fixture(autouse=True, scope="module")
def frozen_objects() -> None:
    """Excludes from collections what exists before the tests of a module run.

    Many tests collect garbage, which took up to a second where it visited all of torch and its tools. For each module
    again, as tracing imports more and more. Finalizers may leave garbage to the next collection, and what is frozen is
    never collected.
    """
    for _ in range(3):
        gc.collect()
    gc.freeze()
