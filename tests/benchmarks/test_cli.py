import pytest

from lmswap.bench.unet3d import cli
from lmswap.bench.unet3d.commands import compare as command
from tests.benchmarks.runs import good_runs, make_study
from tests.benchmarks.scans import make_subject


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
    assert (settings.sizes, settings.budget_bytes, settings.policy) == ((144, 192), 6 * 2**30, "swap_all")
    assert (settings.steps, settings.dtype, settings.head, settings.data) == (7, "bf16", "block", None)
    assert said == f"lmswap bench unet3d {line}"
    assert file.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--sizes 144", "give --budget, or a second, larger size"),
        ("--sizes 100 128", "100 is not a multiple of 16 from 32 up"),
        ("--sizes 16 128", "16 is not a multiple of 16 from 32 up"),
        ("--sizes 0 128", "'0' is not a positive whole number"),
        ("--sizes 96 96", "names a size twice"),
        ("--sizes 96 128 --budget 50%", "--budget 50% is not the same for all sizes"),
        ("--sizes 96 128 --budget much", "budget 'much' is not a byte count"),
        ("--sizes 96 128 --budget=-1GiB", "budget must be more than 0 bytes"),
        ("--sizes 96 128 --policy magic", "unknown policy 'magic'"),
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


def test_scans_that_cannot_be_used_end_the_command_with_their_name(tmp_path, capsys):
    make_subject(tmp_path / "data")
    file = tmp_path / "data" / "case_1" / "case_1_t2.nii.gz"
    file.write_bytes(file.read_bytes()[:-20])
    assert cli.main(f"compare --sizes 32 48 --data {tmp_path / 'data'} --folder {tmp_path / 'out'}".split()) == 2
    assert "case_1_t2.nii.gz" in capsys.readouterr().out.replace("\n", "")
