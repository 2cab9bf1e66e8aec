"""A training in a process of its own begins when it is its turn, and ends with the process that has started it."""

from multiprocessing import Pipe

import pytest

from benchmarks import turns
from benchmarks.turns import _serve


@pytest.fixture(autouse=True)
def own_interrupts(monkeypatch):
    """The tests serve in their own process, whose Ctrl-C stays pytest's."""
    monkeypatch.setattr(turns.signal, "signal", lambda *_: None)


def test_a_training_whose_starter_has_ended_never_begins():
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(SystemExit) as end:
        _serve(lambda *_: pytest.fail("it trained"), "what", theirs)
    assert not end.value.code


def test_a_training_ends_quietly_when_its_starter_ends_before_the_next_turn():
    ours, theirs = Pipe()
    ours.send(None)

    def train(_given, wait_for_turn):
        ours.close()
        wait_for_turn()
        pytest.fail("it went on")

    with pytest.raises(SystemExit) as end:
        _serve(train, "what", theirs)
    assert not end.value.code


def test_an_outcome_without_a_receiver_is_dropped():
    ours, theirs = Pipe()
    ours.send(None)
    _serve(lambda *_: ours.close(), "what", theirs)


def test_each_turn_is_requested_and_the_outcome_is_sent_last():
    ours, theirs = Pipe()

    def train(given, wait_for_turn):
        wait_for_turn()
        return given

    for _turn in ("the warm-up", "a step"):
        ours.send(None)
    _serve(train, "what", theirs)
    theirs.close()
    assert [ours.recv() for _ in range(3)] == [None, None, "what"]
