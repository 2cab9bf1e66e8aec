"""Whatever a file holds, reading it gives what it says or an error of lmswap: no other exception, no crash, no hang.

Files that are valid but for a few faults go through every reader that lmswap has; none may take a gigabyte more than
the process has, and pytest's timeout ends one that hangs. `make fuzz` tries many more.
"""

from __future__ import annotations

import gzip
import json
import math
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.unet3d.brats import DataError, Subject, read_subject
from lmswap.analyze.cost import roofline
from lmswap.cli.entry import main
from lmswap.errors import LmswapError, TraceError
from lmswap.hardware.cache import CacheFile
from lmswap.ir.bytesize import parse_bytes
from lmswap.ir.emulation import PRESETS, EmulatedLink
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.ir.timeline import Lane, Span, Step, Timeline
from lmswap.planner import make_plan, simulate
from lmswap.planner.cache import CachedPlan, PlanCache, PlannedMemory
from lmswap.profiling.figures import figures_of
from lmswap.profiling.readers import read_traces
from lmswap.profiling.readers.own import write_traces
from lmswap.profiling.trace import Stall, Trace
from lmswap.runtime import _C
from tests.benchmarks.unet3d.scans import KINDS, random_volumes
from tests.cases import cases
from tests.ir.build import build, unit_machine
from tests.ir.damage import damaged
from tests.profiling import files

pytestmark = pytest.mark.timeout(300)

STEP = build(
    """
    forward
    f1 1: x -> a
    f2 1: a -> b
    f3 1: b -> y
    backward
    g1 1: t a -> gx
    """,
    sizes={"a": 5000},
    outputs="y",
    tangents="t",
    gradients="gx",
)
MACHINE = unit_machine(out=1e5, into=1e5)
LIMITS = {"tier": "host", "min_swap_bytes": 1}
PLAN = make_plan("tflms", STEP.program, STEP.costs, MACHINE, budget_bytes=2**40, **LIMITS)
NUMBERS = st.sampled_from([b"\0", b"\x7f", b"\x80", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\xff" * 8, b"9" * 40])


@pytest.fixture(autouse=True, scope="module")
def at_most_a_gibibyte_more():
    """Address space beyond that is refused, and the reader that requested it fails its test."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@st.composite
def broken(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with a few bytes written over, taken out or put in, or its end missing."""
    for _ in range(draw(st.integers(1, 4))):
        place = int(draw(st.floats(0, 1)) * len(data))
        way = draw(st.sampled_from(["over", "over", "out", "in", "cut"]))
        number = draw(NUMBERS)
        rest = {"over": data[place + len(number) :], "out": data[place + 7 :], "in": data[place:], "cut": b""}[way]
        data = data[:place] + (b"" if way in ("out", "cut") else number) + rest
    return data


@cases(50)
@given(st.data())
def test_a_program_file(data):
    text = data.draw(damaged(STEP.program.to_json()))
    try:
        program = Program.from_json(text)
        costs = roofline(program, MACHINE)
        make_plan("swap_all", program, costs, MACHINE, budget_bytes=2**70, **LIMITS)
    except LmswapError:
        return
    assert Program.from_json(program.to_json()) == program
    assert str(program)


@cases(75)
@given(st.data(), st.sampled_from(["swap_all", "auto", "tflms"]))
def test_a_machine_description(data, policy):
    text = data.draw(damaged(MACHINE.to_json()))
    try:
        machine = Machine.from_json(text)
        plan = make_plan(policy, STEP.program, STEP.costs, machine, budget_bytes=2**40, **LIMITS)
    except LmswapError:
        return
    assert math.isfinite(plan.predicted_seconds)


@cases(50)
@given(st.data())
def test_a_plan_file(data):
    text = data.draw(damaged(PLAN.to_json()))
    try:
        plan = Plan.from_json(text)
    except LmswapError:
        return
    assert Plan.from_json(plan.to_json()).policy == plan.policy


@cases(100)
@given(data=st.data())
def test_a_cached_or_measured_plan(data, folder, monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(folder))
    cache = PlanCache(MACHINE, {}, **LIMITS)
    sound = CachedPlan(PLAN, STEP.costs, MACHINE, PlannedMemory(PLAN.budget_bytes))
    cache.write(STEP.program, sound)
    path = cache._file(STEP.program, spares=False).path
    path.write_text(data.draw(damaged(path.read_text())), "utf-8", "surrogatepass")
    found = cache.read(STEP.program)
    assert found is None or simulate(STEP.program, found.costs, found.machine, found.plan).seconds >= 0


@cases(25)
@given(data=st.data())
def test_a_cached_or_measured_measurement(data, folder, monkeypatch):
    monkeypatch.setenv("LMSWAP_CACHE_DIR", str(folder))
    from lmswap.hardware.measure import _cached_or_measured

    file = CacheFile.locate("machine", {"device": "cpu"})
    file.write(json.loads(MACHINE.to_json()))
    file.path.write_text(data.draw(damaged(file.path.read_text())), "utf-8", "surrogatepass")
    found = _cached_or_measured(file)
    assert found is None or isinstance(found, Machine)


@cases(20)
@given(data=st.data(), which=st.sampled_from(["program", "machine"]), is_zipped=st.booleans())
def test_the_files_of_the_plan_command(data, which, is_zipped, folder, capsys):
    texts = {"program": STEP.program.to_json(), "machine": MACHINE.to_json()}
    texts[which] = data.draw(damaged(texts[which]))
    paths = {name: folder / f"{name}.json{'.gz' if is_zipped else ''}" for name in texts}
    for name, path in paths.items():
        content = texts[name].encode("utf-8", "surrogatepass")
        path.write_bytes(gzip.compress(content) if is_zipped else content)
    status = main(["plan", str(paths["program"]), "--machine", str(paths["machine"]), "--budget", "1TiB"])
    assert status in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


@cases(100)
@given(st.text() | st.from_regex(r"[0-9]{1,400}(\.[0-9]{1,400})? ?[a-zA-Z]{0,4}(/s)?( out| in)?,?", fullmatch=True))
def test_the_text_of_a_link_or_of_a_byte_count(text):
    for read in (EmulatedLink.parse, parse_bytes):
        try:
            read(text)
        except LmswapError:
            continue
    assert EmulatedLink.parse("pcie3") is PRESETS["pcie3"]


@cases(20)
@given(data=st.data())
def test_the_file_of_a_shared_link(data, folder):
    path = folder / "link"
    path.unlink(missing_ok=True)
    rates = {"out_bytes_per_second": 1e9, "in_bytes_per_second": 2e9}
    _C.Engine(driver="host", shared_link=str(path), **rates).close()
    path.write_bytes(data.draw(broken(path.read_bytes())))
    try:
        engine = _C.Engine(driver="host", shared_link=str(path), **rates)
    except LmswapError:
        return
    engine.open_host_tier(2**20)
    values = np.arange(1000)
    token = engine.out_start(1, "host", 0, values.ctypes.data, values.nbytes, 0)
    engine.close()
    del token


def _own(path):
    spans = (Span(Lane.OUT, "x", 0.25, 0.5, 4096, 3), Span(Lane.COMPUTE, "forward 0", 0.0, 1.0))
    timeline = Timeline("own", spans, ((0.0, 17), (0.5, 12)), (Step(7, 0.0, 1.0),))
    trace = Trace("own", "cpu", timeline, (Stall("conv", "unet.py:3", "x", Lane.OUT, 2, 0.125),), ("a note",))
    write_traces(path, [trace, replace(trace, device="cuda:0")])
    return path


PROFILES = {
    "nsys": files.nsys,
    "nsys 2020": partial(files.nsys, version=2020),
    "nvprof": files.nvprof_sqlite,
    "nvprof csv": files.nvprof_csv,
    "kineto": files.kineto,
    "kineto zipped": partial(files.kineto, is_zipped=True),
    "own": _own,
}


@pytest.fixture(scope="module")
def profiles(folder):
    return {name: write(folder / name.replace(" ", "_")).read_bytes() for name, write in PROFILES.items()}


def read_or_refused(path) -> None:
    try:
        traces = read_traces(path)
        for trace in traces:
            if trace.timeline.seconds > 0:
                assert 0 <= figures_of(trace.timeline).utilization <= 1
    except LmswapError:
        return


@cases(150)
@given(data=st.data(), name=st.sampled_from(list(PROFILES)))
def test_a_profilers_file_with_wrong_bytes(data, name, profiles, folder):
    path = folder / "profile"
    path.write_bytes(data.draw(broken(profiles[name])))
    read_or_refused(path)


@cases(100)
@given(data=st.data(), name=st.sampled_from(["kineto", "own"]))
def test_a_profilers_json_with_wrong_fields(data, name, profiles, folder):
    path = folder / "profile.json"
    path.write_text(data.draw(damaged(profiles[name].decode())), "utf-8", "surrogatepass")
    read_or_refused(path)


VALUES = st.sampled_from([None, -1, 0, 2**62, -(2**63), 1e300, float("inf"), "soon", "", b"\xff", "9" * 50])


@cases(50)
@given(data=st.data(), make=st.sampled_from([files.nsys_tables, files.nvprof_tables]))
def test_a_profilers_tables_with_wrong_values(data, make, folder):
    tables = make()
    for _ in range(data.draw(st.integers(1, 3))):
        columns, rows = tables[data.draw(st.sampled_from(sorted(tables)))]
        if rows:
            row = data.draw(st.integers(0, len(rows) - 1))
            column = data.draw(st.integers(0, len(rows[row]) - 1))
            if "PRIMARY KEY" not in columns:
                rows[row] = (*rows[row][:column], data.draw(VALUES), *rows[row][column + 1 :])
    path = folder / "tables"
    path.unlink(missing_ok=True)
    read_or_refused(files.fill(path, tables))


def test_a_file_that_unpacks_to_gigabytes_is_refused(folder, capsys):
    path = folder / "bomb.json.gz"
    path.write_bytes(2048 * gzip.compress(b" " * 2**20))
    with pytest.raises(TraceError, match="unpacks to more than"):
        read_traces(path)
    assert main(["plan", str(path), "--budget", "1TiB"]) == 2
    assert "unpacks to more than" in capsys.readouterr().err


@pytest.fixture(scope="module")
def volumes(folder):
    """A subject's files as bytes, packed and not."""
    found = {}
    for ending in (".nii", ".nii.gz"):
        for kind, volume in zip(KINDS, random_volumes(), strict=True):
            path = folder / f"scan_{kind}{ending}"
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), path)
            found[path] = path.read_bytes()
    return found


@cases(75)
@given(data=st.data(), ending=st.sampled_from([".nii", ".nii.gz"]), is_inside=st.booleans())
def test_a_scan(data, ending, is_inside, volumes):
    paths = [path for path in volumes if path.name.endswith(ending)]
    path = data.draw(st.sampled_from(paths))
    content = volumes[path]
    if is_inside and ending == ".nii.gz":
        wrong = gzip.compress(data.draw(broken_header(gzip.decompress(content))))
    else:
        wrong = data.draw(broken_header(content) if is_inside else broken(content))
    try:
        path.write_bytes(wrong)
        read_subject(Subject("case", tuple(paths[:4]), paths[4]))
    except DataError:
        return
    finally:
        path.write_bytes(content)


@st.composite
def broken_header(draw: st.DrawFn, data: bytes) -> bytes:
    """Faults in the first 352 bytes, where sizes, kinds and scales stand."""
    return draw(broken(data[:352])) + data[352:]
