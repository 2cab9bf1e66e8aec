import resource
from contextlib import contextmanager

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Cubes this small train fastest on one thread, and beside other work much faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def full_disk():
    """Inside of it no file gets longer than a few bytes."""

    @contextmanager
    def full():
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full
