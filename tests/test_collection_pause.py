import gc
import weakref

import pytest

from lmswap.collection_pause import collection_paused


class Cycle:
    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def enabled():
    gc.collect()
    gc.enable()
    yield
    gc.enable()


def test_garbage_of_the_pause_is_collected_after_it():
    with collection_paused():
        found = weakref.ref(Cycle())
        for _ in range(100_000):
            Cycle()
        assert found() is not None
    assert gc.isenabled()
    Cycle()
    assert found() is None


def test_an_error_ends_the_pause():
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_program_without_collection_stays_without():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_an_inner_pause_ends_with_the_outer_one():
    with collection_paused():
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
