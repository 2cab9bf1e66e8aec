import random
import subprocess
import sys

import pytest

from lmswap.errors import OptionError
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.picture import merge_spans
from tests.reporting.small_step import planned_report, report


def test_a_png_and_an_svg_are_written(tmp_path):
    report().plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    report().plot(str(tmp_path / "step.svg"))
    drawn = (tmp_path / "step.svg").read_text()
    for words in ("predicted: 5.50 s", "measured: 6.00 s", "budget 12.00 MiB", "peak 10.00 MiB", "peak 9.00 MiB"):
        assert words in drawn
    for lane in ("compute", "stall", "out", "in"):
        assert f">{lane}" in drawn


def test_a_timeline_without_a_memory_curve_states_this(tmp_path):
    report(measured=Timeline("measured", (Span(Lane.COMPUTE, "step", 0, 2),), ())).plot(tmp_path / "step.svg")
    assert "memory over time was not recorded" in (tmp_path / "step.svg").read_text()


def test_the_users_own_figures_are_left_alone(tmp_path):
    code = (
        "import sys; from tests.reporting.small_step import report; "
        f"report().plot({str(tmp_path / 'step.png')!r}); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_suffixes_missing_folders_and_empty_pictures_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"must end in \.png or \.svg or \.pdf"):
        report().plot(tmp_path / "step.bmp")
    with pytest.raises(OptionError, match=r"folder '.*missing' does not exist"):
        report().plot(tmp_path / "missing" / "step.png")
    with pytest.raises(OptionError, match="run a training step first"):
        planned_report(program=None, plan=None, predicted=None).plot(tmp_path / "step.png")
    assert list(tmp_path.iterdir()) == []


def test_merged_spans_cover_the_same_time():
    # 0-1, 1-2 touch; 3-5 and 4-6 overlap: two bars, whatever the order.
    spans = [Span(Lane.OUT, "", start, end) for start, end in ((0, 1), (1, 2), (3, 5), (4, 6))]
    random.Random(0).shuffle(spans)
    assert merge_spans(spans) == [(0, 2), (3, 3)]
