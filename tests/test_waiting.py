"""Who waits for long is told for what; who does not, nothing."""

import logging
import re
import time

import pytest

from lmswap import waiting


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(waiting, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def wait_for_longer():
    with waiting.told("counting sheep"):
        time.sleep(0.5)


def test_what_takes_long_is_said_when_it_has_and_again_when_it_is_over(capsys):
    wait_for_longer()
    assert re.fullmatch(r"lmswap: counting sheep \.\.\.\nlmswap: counting sheep: \d+ s\n", capsys.readouterr().err)


def test_it_is_over_also_when_it_fails(capsys):
    with pytest.raises(KeyError), waiting.told("counting sheep"):
        time.sleep(0.5)
        raise KeyError
    assert capsys.readouterr().err.endswith(" s\n")


def test_what_is_quick_is_only_logged(capsys, caplog, monkeypatch):
    monkeypatch.setattr(waiting, "_PATIENCE_SECONDS", 60.0)
    with caplog.at_level(logging.INFO, "lmswap"), waiting.told("counting sheep"):
        pass
    assert capsys.readouterr().err == ""
    assert caplog.messages == ["counting sheep"]


def test_of_the_ranks_of_a_machine_one_says_it(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    wait_for_longer()
    assert capsys.readouterr().err == ""
