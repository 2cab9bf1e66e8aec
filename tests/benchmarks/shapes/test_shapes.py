"""The benchmark of sizes that vary compares steps of the same turn, and fails where lmswap falls short."""

import pytest

from benchmarks.shapes import __main__ as shapes
from benchmarks.shapes.__main__ import main, sentence
from benchmarks.shapes.training import LMSWAP, PLAIN, Timed, Training, train

PLAIN_TIMES = Timed(Training("text", PLAIN, "400MiB", 22), (1.0,) * 20 + (2.0, 4.0), "same")
OWN = Training("text", LMSWAP, "400MiB", 22)


def test_later_steps_are_compared_in_the_same_turn():
    found = Timed(OWN, (3.0,) + (0.5,) * 19 + (2.2, 4.4), "same", num_traces=3, num_sized_plans=5)
    said = sentence(found, PLAIN_TIMES)
    assert said == (
        "22 steps in 19.1 s, 3 of them over 1 s, later ones 1.100 × plain torch's; plain bits; "
        "3 traces and 5 plans for sizes that vary, 0 steps over the budget"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Timed(OWN, PLAIN_TIMES.seconds, "others", num_traces=3), "other losses"),
        (Timed(OWN, PLAIN_TIMES.seconds, "same", num_traces=3, num_over=1), "1 steps over the budget"),
        (Timed(OWN, detail="the process was killed"), "text, lmswap: the process was killed"),
    ],
)
def test_other_bits_excess_and_death_are_failures(found, said, monkeypatch, capsys):
    monkeypatch.setattr(shapes, "train_in_turns", lambda *_, **__: [PLAIN_TIMES, found])
    assert main(["--tasks", "text", "--ways", PLAIN, LMSWAP]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("task", shapes.TASKS)
def test_lmswap_trains_with_plain_bits(task):
    plain, found = (train(Training(task, way, "2GiB", 5), lambda: None) for way in (PLAIN, LMSWAP))
    assert found.losses == plain.losses
    assert found.num_traces == 3
