import io
import sys

import pytest

from benchmarks.unet3d import __main__ as cli
from benchmarks.unet3d import demo
from benchmarks.unet3d.commands import compare as command
from tests.benchmarks.unet3d.runs import good_runs, make_study, swapped_only
from tests.benchmarks.unet3d.scans import make_subject


@pytest.fixture
def asked(monkeypatch):
    """The settings that the command line led to; no training."""
    settings = []

    def compare(given, _on_event, *, command):
        settings.append((given, command))
        return make_study(*good_runs())

    monkeypatch.setattr(command, "compare", compare)
    return settings


def test_the_full_form_reaches_the_comparison(asked, tmp_path):
    file = tmp_path / "results.json"
    line = f"compare --sizes 144 192 --budget 6GiB --policy swap_all --steps 7 --dtype bf16 --head block --json {file}"
    assert cli.main(line.split()) == 0
    ((settings, said),) = asked
    assert (settings.sizes, settings.budget_bytes, settings.policies) == ((144, 192), 6 * 2**30, ("swap_all",))
    assert (settings.steps, settings.dtype, settings.head, settings.data) == (7, "bf16", "block", None)
    assert said == f"python -m benchmarks.unet3d {line}"
    assert file.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--sizes 144", "give --budget, or a second, larger size"),
        ("--sizes 100 128", "100 is not a multiple of 16 from 32 up"),
        ("--sizes 16 128", "16 is not a multiple of 16 from 32 up"),
        ("--sizes 0 128", "'0' is not a positive whole number"),
        ("--sizes 96 96", "names a size twice"),
        ("--sizes 96 128 --json .", "--json . is a folder"),
        ("--sizes 96 128 --budget 50%", "--budget 50% is not the same for all sizes"),
        ("--sizes 96 128 --budget much", "budget 'much' is not a byte count"),
        ("--sizes 96 128 --budget=-1GiB", "budget must be more than 0 bytes"),
        ("--sizes 96 128 --policy magic", "unknown policy 'magic'"),
        ("--sizes 96 128 --seed -1", "'-1' is not a whole number from 0 to 2**63 - 1"),
        ("--sizes 96 128 --seed 9223372036854775808", "is not a whole number from 0"),
        ("--sizes 96 128 --steps -3", "'-3' is not a positive whole number"),
        ("--sizes 96 128 --speed 3", "unrecognized arguments: --speed 3"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(asked, capsys, line, said):
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *line.split()])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not asked


def test_an_interrupted_command_reports_it_in_one_line(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "compare", interrupt)
    assert cli.main(["compare", "--sizes", "96", "128"]) == 130
    assert capsys.readouterr().err == "unet3d: interrupted\n"


def test_scans_that_cannot_be_used_end_the_command_with_their_name(tmp_path, capsys):
    make_subject(tmp_path / "data")
    file = tmp_path / "data" / "case_1" / "case_1_t2.nii.gz"
    file.write_bytes(file.read_bytes()[:-20])
    assert cli.main(f"compare --sizes 32 48 --data {tmp_path / 'data'} --folder {tmp_path / 'out'}".split()) == 2
    shown = capsys.readouterr()
    assert "case_1_t2.nii.gz ends in the middle of its data" in shown.err and not shown.out


def test_a_name_longer_than_a_terminal_stays_on_its_line(tmp_path, capsys):
    missing = tmp_path / "folder with a name" / ("n" * 200)
    assert cli.main(["compare", "--sizes", "32", "48", "--data", str(missing), "--folder", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"unet3d: {missing} is not a folder; give the folder that holds the BraTS subjects"
    ]


def test_a_table_is_printed_where_the_output_has_ascii_only(asked, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["compare", "--sizes", "96", "128"]) == 0
    sys.stdout.flush()
    assert b"128\\xb3 swapped" in written.getvalue()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("64", 'as in SIZES="96 128", not "64"'),
        ("64 80 96", 'not "64 80 96"'),
        ("small large", "'small' is not a positive whole number"),
        ("50 60", "50 is not a multiple of 16 from 32 up"),
        ("128 96", "then a larger one, not 128 96"),
    ],
)
def test_the_demo_refuses_unusable_sizes_before_it_starts(capsys, monkeypatch, sizes, said):
    monkeypatch.setattr(demo, "compare", lambda *_, **__: pytest.fail("it trained"))
    assert demo.main(sizes.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "lmswap demo: interrupted\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "lmswap demo: [Errno 13] Permission denied: 'x'\n"),
    ],
)
def test_a_demo_that_cannot_continue_states_the_reason_in_one_line(capsys, monkeypatch, end, code, said):
    def stop(*_, **__):
        raise end

    monkeypatch.setattr(demo, "compare", stop)
    assert demo.main(["32", "48"]) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("out_bytes", "code"), [(2**20, 0), (0, 1)])
def test_a_demo_that_shows_no_swapping_fails(capsys, monkeypatch, tmp_path, out_bytes, code):
    asked = []

    def compare(settings, _on_event, *, command):
        asked.append(settings)
        return make_study(*good_runs(), swapped_only(out_bytes=out_bytes))

    monkeypatch.setattr(demo, "compare", compare)
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    assert demo.main(["96", "128"]) == code
    assert asked[0].policies == ("auto", "swap")
    assert ("NOTHING was swapped" in capsys.readouterr().out) == bool(code)
