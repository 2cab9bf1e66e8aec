import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import distributed

from lmswap.errors import OptionError, TierError
from lmswap.hardware import measure
from lmswap.hardware.host_memory import HostMemory
from lmswap.hardware.local_ranks import LocalRanks
from lmswap.hardware.measure import describe_machine, describe_share, host_link
from lmswap.ir.machine import Link, Machine, Rate, Tier

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def counted(monkeypatch):
    """A measurement that takes no time and counts how often it was made."""
    machine = Machine.from_json(MACHINE)
    made = []

    def make(device, tier, directory):
        made.append(tier)
        return replace(machine, tiers=(replace(machine.tiers[0], name=tier),))

    monkeypatch.setattr(measure, "_measure_machine", make)
    return made


MACHINE = json.dumps(
    {
        "schema": "lmswap.machine/4",
        "name": "unit",
        "device_bytes": 1,
        "flops_per_second": 1,
        "bytes_per_second": 1,
        "op_seconds": 1,
        "host": {"op_seconds": 2, "copy_seconds": 3},
        "tiers": [
            {
                "name": "disk",
                "capacity_bytes": 1,
                "link": {
                    "out_rate": {"points": [[1, 1]]},
                    "in_rate": {"points": [[1, 2]]},
                    "both_factor": 0.5,
                    "busy_factor": 0.8,
                    "compute_factor": 0.9,
                },
            }
        ],
    }
)


@pytest.mark.slow
def test_a_real_disk_is_measured_through_the_engine(cache, tmp_path):
    machine = describe_machine(CPU, "disk", str(tmp_path))
    link = machine.tier("disk").link
    assert 0 < link.both_factor <= 1
    assert 0 < link.busy_factor <= 1
    assert 0 < link.compute_factor <= 1
    assert link.in_rate.seconds(64 * MIB) > 0
    assert min(machine.flops_per_second, machine.bytes_per_second, machine.op_seconds) > 0
    assert machine.tier("disk").capacity_bytes > 0
    assert Machine.from_json(machine.to_json()) == machine
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]  # the swap file is gone


def test_a_measurement_is_cached_by_tier(cache, counted, tmp_path):
    first = describe_machine(CPU, "disk", str(tmp_path))
    assert describe_machine(CPU, "disk", str(tmp_path)).tiers[0].link == first.tiers[0].link
    assert counted == ["disk"]
    describe_machine(CPU, "host")
    assert counted == ["disk", "host"]
    assert len(list(cache.glob("machine-*.json"))) == 2


def test_refresh_measures_again(cache, counted, tmp_path):
    describe_machine(CPU, "disk", str(tmp_path))
    describe_machine(CPU, "disk", str(tmp_path), refresh=True)
    assert counted == ["disk", "disk"]


def test_another_torch_measures_again(cache, counted, monkeypatch, tmp_path):
    describe_machine(CPU, "disk", str(tmp_path))
    monkeypatch.setattr(torch, "__version__", "99.0")
    describe_machine(CPU, "disk", str(tmp_path))
    assert counted == ["disk", "disk"]


def test_capacity_is_that_of_now_and_not_remembered(cache, counted, monkeypatch, tmp_path):
    describe_machine(CPU, "disk", str(tmp_path))
    found = measure.describe_directory(str(tmp_path))
    monkeypatch.setattr(measure, "describe_directory", lambda path: replace(found, free_bytes=1000 * MIB))
    assert describe_machine(CPU, "disk", str(tmp_path)).tiers[0].capacity_bytes == 900 * MIB
    assert counted == ["disk"]


@pytest.mark.parametrize(("free_bytes", "sample_bytes"), [(22 * MIB, int(0.9 * 22 * MIB)), (900 * MIB, None)])
def test_a_measurement_with_little_memory_is_reported_and_not_cached(
    cache, monkeypatch, tmp_path, free_bytes, sample_bytes
):
    found = measure.describe_directory(str(tmp_path))
    monkeypatch.setattr(measure, "describe_directory", lambda path: replace(found, free_bytes=free_bytes))
    monkeypatch.setattr(measure, "measure_link", lambda *_: Machine.from_json(MACHINE).tiers[0].link)
    tier = describe_machine(CPU, "disk", str(tmp_path)).tier("disk")
    assert (tier.capacity_bytes, tier.sample_bytes) == (int(0.9 * free_bytes), sample_bytes)
    assert len(list(cache.glob("machine-*.json"))) == (sample_bytes is None)


@pytest.mark.usefixtures("cache", "counted")
@pytest.mark.parametrize("launcher", ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"])
@pytest.mark.parametrize(("count", "share"), [("", 800), ("1", 800), ("8", 100)])
def test_pinnable_memory_is_divided_by_the_processes_that_train_together(monkeypatch, launcher, count, share):
    monkeypatch.setattr(measure, "read_host_memory", lambda: HostMemory(2000 * MIB, 1000 * MIB))
    monkeypatch.setenv(launcher, count)
    assert describe_machine(CPU, "host").tiers[0].capacity_bytes == share * MIB


def test_disk_space_is_divided_by_the_processes_that_train_together(cache, counted, monkeypatch, tmp_path):
    found = measure.describe_directory(str(tmp_path))
    monkeypatch.setattr(measure, "describe_directory", lambda path: replace(found, free_bytes=1000 * MIB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert describe_machine(CPU, "disk", str(tmp_path)).tiers[0].capacity_bytes == 300 * MIB


@pytest.fixture
def together(counted, monkeypatch, tmp_path):
    """A function that has three ranks describe their share; beside others copies take 2, 4 and 3 times as long."""
    links = iter([Link(Rate(((MIB, s),)), Rate(((MIB, 2 * s),)), both, 0.8, 0.9) for s, both in SLOWED])

    def measure_link(device, tier, directory, room_bytes):
        counted.append("link")
        return next(links)

    monkeypatch.setattr(measure, "measure_link", measure_link)
    store = distributed.HashStore()

    def describe():
        def share(rank):
            return describe_share(CPU, "disk", str(tmp_path), LocalRanks(store, rank, len(SLOWED)))

        with ThreadPoolExecutor(len(SLOWED)) as threads:
            return list(threads.map(share, range(len(SLOWED))))

    return describe


SLOWED = [(2.0, 0.5), (4.0, 0.9), (3.0, 0.4)]


def test_all_ranks_agree_on_the_slowest_share_and_the_least_room(cache, together, monkeypatch):
    room = iter([900, 700, 800])
    monkeypatch.setattr(measure, "tier_capacity", lambda *_: next(room))
    one, *others = together()
    assert others == [one, one]
    assert one.tier("disk") == Tier("disk", 700, Link(Rate(((MIB, 4.0),)), Rate(((MIB, 8.0),)), 0.4, 0.8, 0.9))


def test_ranks_measure_alone_once_and_then_at_once_and_remember_both(cache, counted, together, tmp_path):
    first = together()
    # In turn: what the first rank has found is there for the others, which have the same device.
    assert counted == ["disk", "link", "link", "link"]
    assert [found.tier("disk").link for found in together()] == [first[0].tier("disk").link] * 3
    assert len(counted) == 4
    # A process that is alone has the whole link.
    assert describe_machine(CPU, "disk", str(tmp_path)).tier("disk").link.out_rate == Rate(((1, 1.0),))


@pytest.mark.parametrize("damage", ["", "{", "[]", MACHINE, MACHINE.replace("both_factor", "factor"), "\udcff"])
def test_a_damaged_cache_file_is_measured_again_and_replaced(cache, counted, tmp_path, damage):
    describe_machine(CPU, "disk", str(tmp_path))
    (path,) = cache.iterdir()
    path.write_bytes(damage.encode("utf-8", "surrogateescape"))
    describe_machine(CPU, "disk", str(tmp_path))
    describe_machine(CPU, "disk", str(tmp_path))
    assert counted == ["disk", "disk"]


def test_an_unwritable_cache_measures_again_and_reports_it(counted, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "lmswap"):
        describe_machine(CPU, "disk", str(tmp_path))
        describe_machine(CPU, "disk", str(tmp_path))
    assert counted == ["disk", "disk"]
    assert "the next process will measure and plan afresh" in caplog.text


def test_an_unknown_tier_and_a_bad_directory_are_refused_before_measuring(cache, counted, tmp_path):
    with pytest.raises(OptionError, match="unknown tier 'tape'; known are host, disk, compressed, device"):
        describe_machine(CPU, "tape")
    with pytest.raises(TierError, match="is not a directory"):
        describe_machine(CPU, "disk", str(tmp_path / "missing"))
    assert counted == []


def test_a_cpu_has_no_link_to_the_host():
    assert host_link(CPU).kind == "none"
