"""Results are written whole or not at all."""

import re
from pathlib import Path

import pytest

from benchmarks.unet3d.brats import DataError
from benchmarks.unet3d.files import write_text

ROOT = Path(__file__).parents[3]


def test_a_failed_write_leaves_the_previous_file(tmp_path, full_disk):
    path = tmp_path / "made" / "results.json"
    write_text(path, "old³")
    with full_disk(), pytest.raises(DataError, match=r"results\.json cannot be written \(File too large\)"):
        write_text(path, "a text that is longer than the old one")
    assert path.read_text(encoding="utf-8") == "old³"
    assert [*path.parent.iterdir()] == [path]


def test_all_benchmarks_write_results_through_one_function():
    writes = re.compile(r"\.write_text\(\s*(to_json|json\.dumps)")
    found = {str(file.relative_to(ROOT)) for file in ROOT.glob("benchmarks/**/*.py") if writes.search(file.read_text())}
    to_parent = {"benchmarks/emulated/train.py", "benchmarks/unet3d/fresh.py"}  # in a folder of its own
    assert found == to_parent | {"benchmarks/unet3d/synthetic.py"}  # the description of a data set
