"""The first hour on a GPU goes on where it was stopped, ends what takes too long, and says on which device it was."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.first_hour import __main__ as first_hour
from benchmarks.first_hour import cards, studies, suite
from benchmarks.first_hour.kernels import kernel_figures
from benchmarks.first_hour.page import page, summary
from benchmarks.first_hour.parts import Part, parts
from benchmarks.unet3d.study import describe_machine
from lmswap.hardware.device import DeviceInfo
from tests.benchmarks.case_study.studies import make_results
from tests.benchmarks.state import outcomes as state_outcomes
from tests.benchmarks.weights import outcomes

ORIGIN = {"driver": "CUDA driver 580", "torch": "2.13.0", "commit": "abcdef", "sizes": [144, 192]}


def step(reserved_bytes, *, retries):
    return {"reserved_bytes": reserved_bytes, "retries": retries}


def way(name, seconds, reserved_bytes, **rest):
    return {"network": "gpt", "way": name, "seconds": seconds, "reserved_bytes": reserved_bytes, **rest}


def of_report(predicted_seconds, measured_seconds, swapped_out_bytes):
    return {
        "predicted_seconds": predicted_seconds,
        "measured_seconds": measured_seconds,
        "swapped_out_bytes": swapped_out_bytes,
    }


KERNELS = {
    "busy_seconds": 0.08,
    "idle_seconds": 0.005,
    "idle_copying_seconds": 0.004,
    "copying_seconds": 0.05,
    "slowed_seconds": 0.001,
    "copies": {"HtoD": {"bytes_per_second": 55e9}, "DtoH": {"bytes_per_second": 54e9}},
}
SPEED = {
    "networks": {
        "gpt": [
            way("plain torch", [0.9, 1.0, 1.2], 2**31),
            way(
                "without a budget",
                [1.1],
                2**31,
                budget_bytes="auto",
                report=of_report(None, 1.0, 0),
                same={"losses": True, "weights": False},
            ),
            way(
                "50%",
                [1.21],
                2**29,
                budget_bytes=2**30,
                report=of_report(1.15, 1.2, 2**28),
                same={"losses": True, "weights": True},
                kernels=KERNELS,
            ),
            {"network": "gpt", "way": "30%", "budget_bytes": 2**29, "refused": "no plan fits"},
        ]
    }
}
FOUND = {
    "facts": {
        "used_by_contexts_bytes": 2**29,
        "total_bytes": 2**33,
        "workspaces_bytes": 2**26,
        "microseconds": {"make an event": 0.8},
        "pinned_bytes_per_second": 3e9,
        "reserved_bytes_per_second": 9e9,
    },
    "tests": {
        "collected": 3,
        "tests": [{"test": "tests/gpu/a.py::test_b", "outcome": "failed"}, {"outcome": "passed"}],
    },
    **dict.fromkeys(("headline", "stalls", "peers", "links", "speed"), SPEED),
    "mapped": {
        "kernels": [
            {
                "operation": "sum",
                "same": True,
                "bytes_per_second": 50e9,
                "device_seconds": 0.001,
                "mapped_seconds": 0.05,
            },
            {"operation": "attention", "failure": "no kernel"},
        ]
    },
    "weights": {"tasks": {"decoder, 8192 tokens": [asdict(outcomes.PLAIN), asdict(outcomes.LMSWAP)]}},
    **{
        name: {"tasks": {task: [asdict(state_outcomes.PLAIN), asdict(state_outcomes.LMSWAP)]}}
        for name, task in (("state", "vit"), ("whole-state", "gpt, 24GiB"))
    },
    "cards": {
        "card": 1.02,
        "runs": [
            {"network": "gpt", "share": None, "steps": [step(2**31, retries=0)]},
            {
                "network": "gpt",
                "share": 0.5,
                "budget_bytes": 2**30,
                "steps": [step(2**29, retries=1), *3 * [step(2**28, retries=2)]],
                "same": {"losses": True, "weights": True},
            },
            {"network": "gpt", "share": 0.3, "budget_bytes": 2**29, "failure": "no plan fits"},
        ],
    },
    "repeats": {
        "default": {"ops": 9, "not_repeated": {"aten.index_add.default": 2}},
        "benchmark": {"ops": 9, "not_repeated": {}},
    },
    "compared": {
        "runs": [
            {
                "configuration": {"size": 192, "policy": "auto"},
                "peak_bytes": 2**31,
                "tensor_peak_bytes": 2**30,
                "step_seconds": [1.0, 0.5],
            }
        ],
        "failures": [],
    },
}


def test_the_page_names_device_and_code_of_every_part(tmp_path):
    make_results().write(tmp_path / "results.json")
    found = {**FOUND, "case-study": json.loads((tmp_path / "results.json").read_text())}
    names = [part.name for part in parts(Path(), 144, 192)]
    assert found.keys() == set(names)
    ended = [
        {
            "title": name,
            "outcome": "done",
            "seconds": 1.0,
            "origin": {**ORIGIN, "commit": f"of {name}"},
            "summary": summary(name, found[name]),
        }
        for name in names
    ]
    text = page("Emulated GPU", ended)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) == 1 + len(names)
    assert all("on Emulated GPU" in heading for heading in headings)
    for name in names:
        assert f"CUDA driver 580; torch 2.13.0; commit of {name}; images of 144³ and 192³." in text
    for part in (
        "512.00 MiB of 8.00 GiB are contexts'",
        "of 3 tests 1 passed, 0 skipped, 1 failed",
        "failed: tests/gpu/a.py::test_b",
        "| gpt | plain torch | 1.0000 | 1.000 × |  |  | 2048 MiB |  |  |",
        "| gpt | without a budget | 1.1000 | 1.100 × | 1.000 × |  | 2048 MiB | 0 MiB | others |",
        "| gpt | 50% | 1.2100 | 1.210 × | 1.100 × | 1.1500 for 1.2000 | 0.500 of it | 256 MiB | same |",
        "| gpt | 30% | no plan fits |",
        "gpt within 50%, 1024 MiB: reserved 0.500 of it, 0 retries after step 3, the bits of plain torch",
        "gpt within 30%, 512 MiB: no plan fits",
        "2 of 9 ops: 2 aten.index_add.default",
        "| 192³, lmswap | 2.00 GiB | 1.00 GiB | 0.500 |",
        "- 128³ under the 96³ budget",
        "| 50% | 80.00 | 5.00 | 4.00 | 50.00 | 1.00 | 55.0 / 54.0 |",
        "| sum | same | 50.0 | 50.00 × |",
        "| attention | no kernel | | |",
        "| vit | same | 0.500 | 1.100 × | 1.000 × | reached |",
        "| gpt, 24GiB | same | 0.500 | 1.100 × | 1.000 × | reached |",
        "| decoder, 8192 tokens | lmswap | 256.00 MiB | 0.500 | 2.400 | 1.200 × | 128.00 MiB | same |",
    ):
        assert part in text


def test_every_part_writes_into_a_folder_of_its_own(tmp_path):
    folders = [part.result.parent for part in parts(tmp_path, 144, 192)]
    assert len(set(folders)) == len(folders)
    assert all(folder.parent == tmp_path for folder in folders)


@pytest.fixture
def hour(tmp_path, monkeypatch):
    """Runs parts that are Python programs, as if on a GPU; gives what the file of results holds then."""
    device = DeviceInfo("cuda:0", "Some GPU", 2**33, 2**33, "2.13.0", "CUDA driver 580")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_hour, "describe_device", lambda _: device)

    def run(*arguments, **programs):
        made = [Part(name, name, ("-c", program), tmp_path / name / "found.json") for name, program in programs.items()]

        def parts(folder, small, large):
            if folder != Path():  # else only their names are requested
                run.folders.append(folder)
            return made

        monkeypatch.setattr(first_hour, "parts", parts)
        monkeypatch.setattr(first_hour, "summary", lambda part, found: [f"{part} found {found}"])
        code = first_hour.main(["--results", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / "first_hour_some_gpu.json").read_text())

    run.folders = []
    return run


def finds(number, folder):
    return f"open({str(folder / 'found.json')!r}, 'w').write('{number}')"


def test_finished_parts_are_skipped_and_failed_ones_are_retried(hour, tmp_path):
    good, bad = finds(1, tmp_path / "good"), "raise SystemExit(3)"
    code, results = hour(good=good, bad=bad)
    assert code == 1
    assert results["found"] == {"good": 1, "bad": None}
    assert results["parts"]["bad"]["outcome"] == "exit status 3, see found.log"
    code, results = hour(good="raise SystemExit(4)", bad=finds(2, tmp_path / "bad"))
    assert code == 0
    assert results["found"] == {"good": 1, "bad": 2}
    assert "| bad | done |" in (tmp_path / "first_hour_some_gpu.md").read_text()


@pytest.mark.parametrize("changed", ["commit", "sizes"])
def test_results_of_other_code_or_sizes_do_not_count_as_finished(hour, tmp_path, monkeypatch, changed):
    hour(one=finds(1, tmp_path / "one"), two=finds(2, tmp_path / "two"))
    arguments = ["--parts", "one"]
    if changed == "commit":
        machine = replace(describe_machine(), commit="of another day")
        monkeypatch.setattr(first_hour, "describe_machine", lambda: machine)
    else:
        arguments += ["--sizes", "48", "64"]
    code, results = hour(*arguments, one=finds(3, tmp_path / "one"), two="raise SystemExit(4)")
    assert code == 0
    assert results["found"] == {"one": 3, "two": 2}
    text = (tmp_path / "first_hour_some_gpu.md").read_text()
    assert "one found 3" in text and "two found 2" in text
    assert results["parts"]["one"]["origin"][changed] != results["parts"]["two"]["origin"][changed]
    assert len(set(hour.folders)) == 2  # what parts go on with is of the same code


def test_a_part_that_is_none_is_refused(hour, capsys):
    with pytest.raises(SystemExit):
        hour("--parts", "factz", good="")
    assert "factz" in capsys.readouterr().err


def test_output_and_progress_of_a_part_are_printed(hour, monkeypatch, capsys):
    monkeypatch.setattr(first_hour, "_SILENT_SECONDS", 0.1)
    hour(slow="import time; print('[b]loading[/]', flush=True); time.sleep(2)")
    said = capsys.readouterr().out
    assert "[b]loading[/]\n" in said and "... 1 s" in said


def starts(written, then):
    """A program that starts a process in a group of its own, as tests are; that writes its number."""
    child = f"import os, time; open({str(written)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    return (
        f"import os, subprocess, sys, time\nsubprocess.Popen([{sys.executable!r}, '-c', {child!r}], process_group=0)\n"
        f"while not os.path.exists({str(written)!r}): time.sleep(0.1)\n{then}"
    )


def check_dead(written):
    number = int(written.read_text())
    until = time.monotonic() + 60
    while is_alive(number) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(number)


@pytest.mark.slow
def test_a_part_over_its_time_limit_is_ended_with_its_processes(hour, tmp_path):
    code, results = hour("--limit", "5", slow=starts(tmp_path / "child", "time.sleep(600)"), after="")
    assert code == 1
    assert results["parts"]["slow"]["outcome"] == "ended after 5 s"
    assert results["parts"]["after"]["outcome"] == "done"
    check_dead(tmp_path / "child")


def test_processes_started_by_a_part_end_with_it(hour, tmp_path):
    assert hour(short=starts(tmp_path / "child", ""))[0] == 0
    check_dead(tmp_path / "child")


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_part_ends_its_processes_and_keeps_results(hour, tmp_path, capsys, sent):
    before = signal.getsignal(signal.SIGTERM)
    interrupts = f"import signal; os.kill(os.getppid(), signal.{sent}); time.sleep(600)"
    code, results = hour(good=finds(1, tmp_path / "good"), bad=starts(tmp_path / "child", interrupts), other="")
    assert code == 130
    assert results["found"] == {"good": 1}
    assert capsys.readouterr().err == "first hour: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before
    check_dead(tmp_path / "child")


def test_results_that_cannot_be_written_leave_those_that_were_there(hour, tmp_path, capsys, full_disk):
    hour(one="", two="raise SystemExit(1)")
    with full_disk():
        code, results = hour(one="", two="")
    assert code == 2
    assert results["parts"]["two"]["outcome"] == "exit status 1, see found.log"
    assert "first_hour_some_gpu.json cannot be written" in capsys.readouterr().err
    assert hour(one="", two="")[0] == 0


def is_alive(number):
    stat = Path(f"/proc/{number}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z" and os.getpid() != number


def test_without_a_gpu_the_options_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_hour.main([]) == 2
    assert "DEVICE=emulated" in capsys.readouterr().out


@pytest.fixture
def its_tests(tmp_path, monkeypatch):
    """Runs a file of tests as those of the GPU are run; gives exit status, and outcomes in order of their end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "_HOW", ("-m", "pytest", "-p", "no:cacheprovider"))

    def run(text, max_seconds=60, **options):
        Path("test_some.py").write_text(f"import os, subprocess, sys, time, pytest\n{text}")
        code = suite.run(Path("found.json"), ["test_some.py"], max_seconds, **options)
        found = json.loads(Path("found.json").read_text()) if Path("found.json").exists() else None
        return code, found and {test["test"].partition("::")[2]: test for test in found["tests"]}

    return run


def outcomes(found):
    return {name: test["outcome"] for name, test in found.items()}


def test_tests_that_are_not_found_have_not_passed(its_tests, capsys):
    assert its_tests("") == (1, None)
    assert its_tests("nothing.there") == (1, None)
    assert "NameError" in capsys.readouterr().out


def test_interrupted_tests_resume_and_failed_ones_are_retried_last(its_tests, capsys):
    some = "def test_a(): assert os.path.exists('more')\ndef test_b(): pytest.skip('why')\n"
    code, found = its_tests(some)
    assert (code, outcomes(found)) == (1, {"test_a": "failed", "test_b": "skipped"})
    assert "assert os.path.exists" in Path("found.log").read_text()
    capsys.readouterr()
    Path("more").touch()
    code, found = its_tests(some + "def test_c(): pass")
    assert (code, outcomes(found)) == (0, {"test_a": "passed", "test_b": "skipped", "test_c": "passed"})
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert said == [["test_some.py::test_c", "passed,"], ["test_some.py::test_a", "passed,"]]


def test_a_test_that_ends_the_process_is_the_only_failure(its_tests):
    numbers = "def note(): open('numbers', 'a').write(f'{os.getpid()} ')\n"
    bodies = {"test_a": "note()", "test_b": "os.kill(os.getpid(), 9)", "test_c": "note()", "test_d": "note()"}
    code, found = its_tests(numbers + "".join(f"def {name}(): {body}\n" for name, body in bodies.items()))
    assert (code, outcomes(found)) == (1, {**dict.fromkeys(bodies, "passed"), "test_b": "failed"})
    first, second, third = Path("numbers").read_text().split()
    assert first != second == third


def test_parameters_with_spaces_are_names_and_marks_choose(its_tests):
    some = "@pytest.mark.parametrize('a', ['one two'])\ndef test_a(a): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
    code, found = its_tests(some, marks="not skip")
    assert (code, outcomes(found)) == (0, {"test_a[one two]": "passed"})


def test_a_test_over_its_time_limit_is_ended_with_its_processes(its_tests, tmp_path):
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code, found = its_tests(f"def test_a(): subprocess.run([sys.executable, '-c', {child!r}])\n", 10)
    assert (code, outcomes(found)) == (1, {"test_a": "failed"})
    assert "test_some.py::test_a" in found["test_a"]["end"]
    check_dead(tmp_path / "child")


@pytest.mark.parametrize(("last", "code"), [("refused", 0), ("failure", 1)])
def test_speeds_and_refusals_are_stored_as_they_are_found(tmp_path, monkeypatch, last, code):
    runs = [SPEED["networks"]["gpt"][0], {"network": "gpt", "way": "30%", last: "why"}]
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(run)}'\n" for run in runs))
    script.chmod(0o755)
    monkeypatch.setattr(studies.sys, "executable", str(script))
    monkeypatch.setattr(studies, "describe_device", lambda _: DeviceInfo("cuda:0", "Some GPU", 1, 1, "2.13.0", "580"))
    assert studies.keep(tmp_path / "speed.json", ["speed", "speed.json"], ["gpt"]) == code
    found = json.loads((tmp_path / "speed.json").read_text())
    assert (found["device"], found["driver"], found["networks"]) == ("Some GPU", "580", {"gpt": runs})


def event(category, name, start, seconds, **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": seconds, "args": arguments}


def test_kernels_are_separated_from_idle_time_and_by_copy_overlap():
    grid = {"grid": [1, 2, 3]}
    events = [
        event("kernel", "conv", 0, 100, **grid),  # alone
        event("kernel", "conv", 150, 120, **grid),  # beside a copy
        event("kernel", "conv", 300, 500, grid=[9]),  # another grid: nothing to compare it with
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 120, 200, bytes=1000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 100, bytes=2000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 800, bytes=9000),
        event("cuda_runtime", "cudaLaunchKernel", 0, 900),
    ]
    found = kernel_figures(events, steps=2)
    microseconds = {name: round(2e6 * value) for name, value in found.items() if name.endswith("_seconds")}
    assert microseconds == {
        "kernel_seconds": 720,
        "busy_seconds": 720,
        "idle_seconds": 80,
        "idle_copying_seconds": 60,
        "copying_seconds": 300,
        "slowed_seconds": 20,
        "compared_seconds": 120,
    }
    assert found["copies"]["DtoH"] == {"num": 0.5, "bytes": 500, "bytes_per_second": pytest.approx(5e6)}
    assert list(found["longest"]) == ["conv"]
    assert kernel_figures([event("cuda_runtime", "cudaLaunchKernel", 0, 900)], steps=1) == {}


def test_every_study_knows_its_networks_and_refuses_others(monkeypatch, capsys):
    known = studies.studies((48, 64), are_small=True, traces=None)
    assert {"headline", "stalls", "peers", "links", "speed"} == set(known)
    monkeypatch.setattr(studies.sys, "argv", ["studies", "headline", "out.json", "--networks", "vit"])
    with pytest.raises(SystemExit):
        studies.main()
    assert "headline has unet3d, unet3d_bf16, not vit" in capsys.readouterr().err


@pytest.fixture
def dealt(tmp_path, monkeypatch):
    """Runs the study of the cards without training: ``outcomes`` has by share what comes of it; gives what was run."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    trained = {"losses": [1.0], "weights": "a", "between_bytes": 100, "steps": 3 * [step(1100, retries=0)]}

    def run(outcomes=None):
        ran = []

        def fresh(name, budget_bytes, *, are_small):
            ran.append(budget_bytes)
            return (outcomes or {}).get(budget_bytes, trained)

        monkeypatch.setattr(cards, "_fresh", fresh)
        code = cards._keep(tmp_path / "cards.json", ["gpt"], are_small=True)
        return code, ran, json.loads((tmp_path / "cards.json").read_text())["runs"]

    return run


def test_runs_on_cards_resume_and_repeat_failed_ones(dealt):
    refused = {"failure": "lmswap.errors.PlanInfeasible: no plan fits"}
    code, ran, runs = dealt({600: {"failure": "torch.OutOfMemoryError: CUDA out of memory"}, 400: refused})
    assert (code, ran, len(runs)) == (1, [None, 800, 600, 400], 4)
    code, ran, runs = dealt()
    assert (code, ran) == (0, [600])
    assert [run.get("failure") for run in runs] == [None, None, None, refused["failure"]]
    assert dealt()[:2] == (0, [])


def test_interrupted_runs_on_cards_keep_their_results(dealt, monkeypatch):
    class Stopped(BaseException):
        pass

    class Outcomes(dict):
        def get(self, budget_bytes, default):
            if budget_bytes == 600:
                raise Stopped
            return default

    with pytest.raises(Stopped):
        dealt(Outcomes({1: None}))
    assert dealt()[1] == [600, 400]


@pytest.mark.parametrize(
    ("program", "said"),
    [("kill -KILL $$", "ended by SIGKILL"), ("echo one >&2; echo 'Error: two' >&2; exit 1", "Error: two")],
)
def test_a_card_whose_run_dies_reports_the_reason(tmp_path, monkeypatch, program, said):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setattr(cards.sys, "executable", str(script))
    assert cards._fresh("gpt", None, are_small=True) == {"failure": said}
