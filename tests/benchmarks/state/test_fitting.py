"""A model that fits its budget copies nothing with any arguments, and steps of the same turn are compared."""

import pytest

from benchmarks.state import fitting
from benchmarks.state.fitting import WITH, WITHOUT, Timed, Training, main, sentence, train

TRAINING = Training("gpt", "tiny", WITHOUT, "cpu", 3)
PLAIN = Timed(TRAINING, (1.0, 2.0, 4.0), (0.001, 0.002, 0.003))


def test_ratios_are_those_of_steps_in_the_same_turn():
    given = Timed(TRAINING, (1.1, 2.2, 4.4), (0.002, 0.003, 0.004))
    said = sentence(PLAIN, PLAIN, given)
    assert "a step takes 2.000 s, the same again 1.000 × (1.000 to 1.000)" in said
    assert "with weights= and optimizer= 1.100 × (1.100 to 1.100)" in said
    assert said.endswith("lmswap's own time is 2.00 ms a micro-batch, with them 3.00 ms")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Timed(TRAINING, PLAIN.seconds, PLAIN.own_seconds, copied_bytes=2**20), "it copied 1.00 MiB"),
        (Timed(TRAINING, detail="the process was killed"), "gpt: the process was killed"),
    ],
)
def test_what_copies_or_dies_is_a_failure(given, said, monkeypatch, capsys):
    monkeypatch.setattr(fitting, "train_in_turns", lambda *_, **__: [PLAIN, PLAIN, given])
    assert main(["--tasks", "gpt", "--size", "tiny"]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("way", [WITHOUT, WITH])
@pytest.mark.parametrize("task", ["gpt", "lora"])
def test_a_model_that_fits_copies_nothing(task, way):
    turns = []
    found = train(Training(task, "tiny", way, "cpu", 3), lambda: turns.append(None))
    assert found.copied_bytes == 0
    assert len(turns) == len(found.seconds) == len(found.own_seconds) == 3
