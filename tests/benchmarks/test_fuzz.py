"""The counts of `make fuzz`: passed cases by test, from the output of hypothesis 6.170."""

import pytest

from benchmarks import fuzz

PRINTED = """
tests/fuzz/test_models.py ..                                             [ 66%]
tests/fuzz/test_readers.py .                                             [100%]
============================ Hypothesis Statistics =============================

tests/fuzz/test_models.py::test_a_model:

  - during generate phase (20.51 seconds):
    - Typical runtimes: ~ 500-900 ms, of which < 1ms in data generation
    - 24 passing, 0 failing, and 3 invalid test cases
    - Events:
      * 40.00%, swaps: 2 or more

  - Stopped because settings.max_examples=25

tests/benchmarks/distributed/test_predict.py::test_a_part[of two, [a b]]:

  - during generate phase (0.31 seconds):
    - Typical runtimes: ~ 1-5 ms, of which < 1ms in data generation
    - 50 passing, 0 failing, and 0 invalid test cases

  - Stopped because settings.max_examples=50

============================== 3 passed in 21.00s ==============================
"""


def test_the_cases_that_passed_are_counted_by_test():
    assert fuzz.counts(PRINTED) == {
        "fuzz/test_models.py::test_a_model": 24,
        "benchmarks/distributed/test_predict.py::test_a_part[of two, [a b]]": 50,
    }


@pytest.mark.parametrize("outcome", [(1, {"fuzz/test_models.py::test_a_model": 24}), (0, {"a": 0, "b": 5}), (0, {})])
def test_nothing_is_written_when_a_case_failed_or_was_not_counted(outcome, monkeypatch, tmp_path):
    monkeypatch.setattr(fuzz, "fuzz", lambda times: outcome)
    assert fuzz.main(["--output", str(tmp_path / "fuzz.json")]) == 1
    assert not (tmp_path / "fuzz.json").exists()
