"""A run in a process of its own: its turns, its end, and what is said when that comes early."""

import signal
import sys
from dataclasses import replace

import pytest

from benchmarks.unet3d import fresh as fresh_module
from benchmarks.unet3d.fresh import RunFailed, run_compared, run_fresh, warmed_up
from tests.benchmarks.unet3d.runs import make_configuration


@pytest.fixture
def replaced_child(monkeypatch, tmp_path):
    """Runs a few lines of Python instead of the training, in a real process."""

    def replace(code):
        script = tmp_path / "python"
        script.write_text(f"#!{sys.executable}\nimport os, sys\nevents = int(sys.argv[-1])\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(fresh_module.sys, "executable", str(script))

    return replace


def fail_of(configuration, tmp_path):
    with pytest.raises(RunFailed) as failure:
        run_fresh(configuration, tmp_path / "logs", lambda *_: None)
    return str(failure.value)


def test_a_crash_is_reported_with_the_end_of_its_output(replaced_child, tmp_path):
    replaced_child("print('x\\n' * 99); sys.exit('no luck')")
    message = fail_of(make_configuration(), tmp_path)
    assert message.startswith("ended with exit status 1; its output is in ")
    assert message.endswith("no luck")
    assert "128-plain.log" in message


@pytest.mark.parametrize(("sent", "said"), [("SIGKILL", "ran out of memory"), ("SIGSEGV", "signal SIGSEGV")])
def test_a_signal_is_reported(replaced_child, tmp_path, sent, said):
    replaced_child(f"import signal; os.kill(os.getpid(), signal.{sent})")
    assert said in fail_of(make_configuration(), tmp_path)


def test_an_error_that_the_run_understood_is_reported_in_its_words(replaced_child, tmp_path):
    replaced_child('os.write(events, b\'{"event": "failed", "message": "budget too small"}\\n\'); sys.exit(1)')
    assert fail_of(make_configuration(), tmp_path) == "budget too small"


_TURNS = """start = int(sys.argv[-3])
os.write(events, b'{"event": "ready"}\\n')
with os.fdopen(start) as file:
    for step in range(2):
        line = file.readline().strip()
        os.write(events, b'{"event": "step", "step": %d}\\n{"event": "ready"}\\n' % step)
    file.readline()
os.write(events, b'{"event": "failed", "message": "%s, %s"}\\n' % (line.encode(), os.environb[b"LMSWAP_TEST"]))
"""


def test_a_child_continues_on_its_parents_signal(replaced_child, tmp_path):
    replaced_child(_TURNS)
    happened = []

    def note(_, event):
        happened.append(event["event"])

    with warmed_up(make_configuration(), tmp_path / "logs", note, {"LMSWAP_TEST": "seen"}) as run:
        for steps in range(3):
            assert happened == ["ready"] + steps * ["step", "ready"] and not run.has_ended
            run.take_turn()
        assert run.has_ended and happened[-1] == "failed"
        run.take_turn()  # its turns are over
    with pytest.raises(RunFailed, match="start, seen"):
        run.finish()


_THREE_STEPS = """
import json
configuration = json.load(open(sys.argv[3]))
with os.fdopen(int(sys.argv[5])) as file:
    for step in range(4):
        if configuration["seed"] == 1 and step == DIES:
            sys.exit("no luck")
        if configuration["takes_turns"] or step == 0:
            os.write(events, b'{"event": "ready"}\\n')
            file.readline()
        os.write(events, b'{"event": "step"}\\n')
os.write(events, b'{"event": "failed", "message": "at its end"}\\n')
"""


def compare_three(replaced_child, tmp_path, dies=None, needed_bytes=0, device="cpu"):
    """What happened, as (seed, event) in order, and what the three runs said at last; that of seed 1 ``dies`` early."""
    replaced_child(_THREE_STEPS.replace("DIES", str(dies)))
    happened = []
    configurations = [replace(make_configuration(), seed=seed, device=device) for seed in range(3)]
    failures = run_compared(
        configurations, tmp_path / "logs", lambda c, event: happened.append((c.seed, event["event"])), needed_bytes
    )
    assert [failure.configuration for failure in failures] == configurations
    return happened, [failure.message for failure in failures]


@pytest.mark.parametrize("dies", [None, 0, 2])
def test_compared_variants_warm_up_in_sequence_and_alternate_steps(replaced_child, tmp_path, dies):
    happened, messages = compare_three(replaced_child, tmp_path, dies)
    steps = [seed for seed, event in happened if event == "step"]
    assert steps == [seed for step in range(4) for seed in range(3) if seed != 1 or dies is None or step < dies]
    first_step = happened.index((0, "step"))
    assert [seed for seed, event in happened[:first_step] if event == "ready"] == [0, *([1] if dies != 0 else []), 2]
    assert messages[0] == messages[2] == "at its end"
    assert messages[1] == "at its end" if dies is None else messages[1].endswith("no luck")
    assert [seed for seed, event in happened if event == "failed"].count(1) == 1


@pytest.mark.parametrize("limits", [{"device": "cuda"}, {"needed_bytes": 2**60}])
def test_variants_that_do_not_fit_in_memory_together_run_in_sequence(replaced_child, tmp_path, limits):
    happened, _ = compare_three(replaced_child, tmp_path, **limits)
    assert [seed for seed, _ in happened] == sorted(seed for seed, _ in happened)


def test_a_child_that_waits_for_its_turn_does_not_outlive_an_error(replaced_child, tmp_path):
    replaced_child(_TURNS)
    with (
        pytest.raises(ValueError, match="of another"),
        warmed_up(make_configuration(), tmp_path / "logs", lambda *_: None) as run,
    ):
        raise ValueError("of another")
    assert run._child.returncode == -signal.SIGKILL


def test_a_child_that_died_while_it_waited_has_ended(replaced_child, tmp_path):
    replaced_child("os.write(events, b'{\"event\": \"ready\"}\\n'); sys.exit('no luck')")
    with warmed_up(make_configuration(), tmp_path / "logs", lambda *_: None) as run:
        run._child.wait()
        run.take_turn()
        assert run.has_ended
        with pytest.raises(RunFailed, match="ended with exit status 1"):
            run.finish()


def test_an_interrupted_parent_leaves_no_child(replaced_child, tmp_path):
    replaced_child('os.write(events, b\'{"event": "pid", "pid": %d}\\n\' % os.getpid()); import time; time.sleep(60)')
    pids = []

    def interrupt(_configuration, event):
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fresh(make_configuration(), tmp_path / "logs", interrupt)
    with pytest.raises(ProcessLookupError):
        fresh_module.os.kill(pids[0], signal.SIG_DFL)
