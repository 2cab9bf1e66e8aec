import json

import pytest

from benchmarks import tests_kept

SUITE = """<testsuites>
<testsuite errors="{errors}" failures="{failures}" skipped="3" tests="40" time="61.4" timestamp="2026-11-25T04:00:00">
<testcase name="test_a" time="1.0"/></testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(tests_kept, "RESULTS", tmp_path / "kept.json")
    return tmp_path


def test_passed_tests_are_stored_with_their_time_machine_and_commit(results):
    (results / "tests.xml").write_text(SUITE.format(errors=0, failures=0))
    assert tests_kept.main([str(results / "tests.xml")]) == 0
    kept = json.loads((results / "kept.json").read_text())
    assert [kept[name] for name in ("passed", "skipped", "failed", "seconds")] == [37, 3, 0, 61]
    assert kept["begun"] == "2026-11-25T04:00:00"
    assert {"cpu", "torch", "commit"} <= kept["machine"].keys()


@pytest.mark.parametrize("counts", [{"errors": 1, "failures": 0}, {"errors": 0, "failures": 1}])
def test_results_of_failed_tests_are_not_stored(results, counts, capsys):
    (results / "tests.xml").write_text(SUITE.format(**counts))
    assert tests_kept.main([str(results / "tests.xml")]) == 1
    assert not (results / "kept.json").exists()
    assert "1 tests failed" in capsys.readouterr().err
