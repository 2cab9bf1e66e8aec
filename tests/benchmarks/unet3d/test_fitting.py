import pytest
import torch

from benchmarks.unet3d import fitting
from benchmarks.unet3d.fitting import CPU_PAIRS, GOAL_SECONDS, compute_threads, demo_seconds, fitting_pair


@pytest.mark.parametrize(("threads", "computing"), [(1, 1), (2, 1), (8, 7)])
def test_one_thread_is_left_to_the_copies_where_there_are_more(monkeypatch, threads, computing):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert compute_threads() == computing


def test_the_trial_computes_on_as_many_threads_as_the_demo_and_reports_its_events(monkeypatch, tmp_path):
    asked, events = [], []

    def run(configuration, _, on_event):
        asked.append(configuration)
        on_event(configuration, {"event": "phase", "phase": "loading"})
        return Timed()

    monkeypatch.setattr(fitting.synthetic, "make_subjects", lambda *_: None)
    monkeypatch.setattr(fitting.brats, "find_subjects", lambda _: ["one"])
    monkeypatch.setattr(fitting, "prepare_cube", lambda *_: "cube")
    monkeypatch.setattr(fitting, "run_fresh", run)
    assert fitting.trial_seconds(tmp_path, 3, lambda _, event: events.append(event["phase"])) == 2.0
    assert events == ["loading"]
    assert asked[0].threads == 3


class Timed:
    timed_seconds = (1.0, 2.0, 3.0)


def test_the_largest_sizes_are_taken_that_train_in_time():
    assert fitting_pair(1e-3) == CPU_PAIRS[0]
    assert fitting_pair(1e3) == CPU_PAIRS[-1]
    small, large = fitting_pair(0.9)
    assert demo_seconds(large, 0.9) <= GOAL_SECONDS
    assert (small, large) == (64, 80)
