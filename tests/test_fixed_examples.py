"""Hypothesis draws the same examples in each run of `make test`."""

import pytest
from hypothesis.internal.conjecture import providers

from tests.cases import IS_FUZZING


@pytest.mark.skipif(IS_FUZZING, reason="fuzzing draws freely")
def test_examples_do_not_depend_on_which_modules_are_loaded():
    assert not len(providers._get_local_constants())
