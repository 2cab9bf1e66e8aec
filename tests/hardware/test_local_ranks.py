"""Ranks that meet: each is a thread here, over a store of torch's in memory."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn

import lmswap
from lmswap.errors import LmswapError, OptionError, RankMissing, TierError
from lmswap.hardware.local_ranks import LocalRanks, may_have_local_ranks


def meet(count, call, *, store=None, seconds=60, missing=()):
    """What ``call`` gives each rank's node, or raises."""
    store = store or dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))

    def run(rank):
        try:
            return call(LocalRanks(store, rank, count))
        except (LmswapError, torch.OutOfMemoryError) as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, [rank for rank in range(count) if rank not in missing]))


def test_gather_returns_the_results_of_all_ranks():
    assert meet(3, lambda node: node.gather("a", lambda: f"of {node.rank}")) == [["of 0", "of 1", "of 2"]] * 3


def test_in_turn_one_begins_when_the_one_before_it_is_done():
    running, most, order = [], [], []

    def find(rank):
        running.append(rank)
        time.sleep(0.02)
        most.append(len(running))
        order.append(rank)
        running.remove(rank)
        return ""

    meet(4, lambda node: node.gather("a", lambda: find(node.rank), in_turn=True))
    assert order == [0, 1, 2, 3]
    assert max(most) == 1


def test_uncoordinated_ranks_measure_concurrently():
    barrier = threading.Barrier(3, timeout=60)
    meet(3, lambda node: node.gather("a", lambda: str(barrier.wait())))


def test_successive_objects_have_separate_keys():
    store = dist.HashStore()
    for word in ("first", "second"):
        assert meet(2, lambda node, word=word: node.gather("a", lambda: word), store=store) == [[word] * 2] * 2


@pytest.mark.parametrize("in_turn", [False, True])
def test_an_error_of_one_is_raised_by_all(in_turn):
    def find(rank):
        if rank == 1:
            raise TierError("no room")
        return ""

    found = meet(3, lambda node: node.gather("a", lambda: find(node.rank), in_turn=in_turn))
    assert [str(error) for error in found] == [
        "rank 1 of this machine: no room",
        "no room",
        "rank 1 of this machine: no room",
    ]


def test_an_error_of_torch_is_raised_by_all_ranks():
    def find(rank):
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ""

    found = meet(2, lambda node: node.gather("a", lambda: find(node.rank)))
    assert [str(error) for error in found] == ["rank 1 of this machine: CUDA out of memory", "CUDA out of memory"]


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_missing_rank_is_named_after_the_timeout(in_turn):
    found = meet(3, lambda node: node.gather("a", str, in_turn=in_turn), seconds=0.2, missing=[1])
    for error in found:
        assert isinstance(error, RankMissing)
        assert isinstance(error, TimeoutError)
        assert (error.awaited, error.seconds) == (1, 0.2)
        assert f"rank {error.rank} of this machine has waited 0.2 s for rank 1" in str(error)
        assert "together=False" in str(error)


def test_compute_once_runs_on_one_rank():
    made = []

    def make():
        made.append(1)
        time.sleep(0.05)
        return bytes([0, 255, len(made)])

    assert meet(4, lambda node: node.compute_once("plan", make)) == [bytes([0, 255, 1])] * 4
    assert made == [1]


def test_compute_once_does_not_wait_for_ranks_that_do_not_call():
    assert meet(2, lambda node: node.compute_once(f"plan {node.rank}", lambda: b"own")) == [b"own"] * 2


def test_if_make_fails_the_other_ranks_get_empty_bytes():
    started = threading.Event()

    def call(node):
        if node.rank:
            started.wait(60)
        return node.compute_once("plan", fail)

    def fail():
        started.set()
        time.sleep(0.05)
        raise TierError("no room")

    failed, other = meet(2, call)
    assert isinstance(failed, TierError)
    assert other == b""


def test_a_claim_holds_for_the_rank_that_made_it_first():
    store = dist.HashStore()
    first, second = LocalRanks(store, 0, 2), LocalRanks(store, 1, 2)
    assert [first.claim("plan"), second.claim("plan"), first.claim("plan"), second.claim("plan")] == [True, False] * 2
    assert second.claim("another plan")


def test_a_rank_that_calls_compute_once_again_gets_the_same_result():
    made = iter([b"first", b"second"])
    node = LocalRanks(dist.HashStore(), 0, 2)
    assert [node.compute_once("plan", lambda: next(made)) for _ in range(2)] == [b"first"] * 2


def test_compute_once_times_out_without_a_result():
    store = dist.HashStore()
    store.add("1/plan/claims", 1)  # by one that has died
    (error,) = meet(1, lambda node: node.compute_once("plan", bytes), store=store, seconds=0.2)
    assert isinstance(error, RankMissing)
    assert "for another rank" in str(error)


LAUNCHED = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.fixture
def joined(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_without_a_local_world_size_may_have_neighbours(monkeypatch):
    assert not may_have_local_ranks()
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    assert may_have_local_ranks()
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    assert not may_have_local_ranks()


def test_without_torch_distributed_a_process_is_alone(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert LocalRanks.here() is None


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("changes", [{"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": ""}, {"LOCAL_RANK": ""}])
def test_a_process_that_torchrun_did_not_start_with_others_is_alone(monkeypatch, changes):
    for name, value in {**LAUNCHED, **changes}.items():
        monkeypatch.setenv(name, value)
    assert LocalRanks.here() is None


@pytest.mark.usefixtures("joined")
def test_ranks_are_read_from_torchruns_variables(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    node = LocalRanks.here()
    assert (node.rank, node.count) == (1, 2)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"])
@pytest.mark.parametrize("value", ["abc", "-1", "2.0", " 2", "2(x3)", "²", "9" * 5000])
def test_a_launchers_variable_that_is_no_number_is_refused_by_name(monkeypatch, name, value):
    for known, number in {**LAUNCHED, name: value}.items():
        monkeypatch.setenv(known, number)
    with pytest.raises(OptionError, match=f"environment variable {name} is '.*': a launcher sets it to a whole number"):
        LocalRanks.here()


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
@pytest.mark.parametrize("value", ["0", "abc"])
def test_an_impossible_number_of_processes_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=f"environment variable {name} is .*{value}"):
        lmswap.enable(nn.Linear(8, 8))


@pytest.mark.usefixtures("joined")
def test_a_rank_beyond_the_local_count_is_rejected_before_it_waits(monkeypatch):
    for name, value in {**LAUNCHED, "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="LOCAL_RANK is 2, and the ranks of this machine are 0 to 1"):
        LocalRanks.here()
