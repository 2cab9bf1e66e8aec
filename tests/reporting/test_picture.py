import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lmswap.errors import OptionError
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.picture import KINDS, merge_spans, write_picture
from tests.reporting.small_step import MIB, planned_report, report, timeline

LABELS = ("budget 12.00 MiB", r"peak [\d.]+ MiB")


def test_a_png_and_an_svg_are_written(tmp_path):
    report().plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    report().plot(str(tmp_path / "step.svg"))
    drawn = (tmp_path / "step.svg").read_text()
    for words in ("predicted: 5.50 s", "measured: 6.00 s", "budget 12.00 MiB", "peak 10.00 MiB", "peak 9.00 MiB"):
        assert words in drawn
    for lane in ("compute", "stall", "out", "in"):
        assert f">{lane}" in drawn


def test_the_label_of_a_peak_close_to_the_budget_is_above_both_lines(tmp_path):
    heights = {}
    for peak_bytes in (11.9 * MIB, 6 * MIB):
        report(measured_peak_bytes=peak_bytes).plot(tmp_path / "step.svg")
        drawn = (tmp_path / "step.svg").read_text()
        found = [re.search(rf' y="([\d.]+)"[^>]*>{label}<', drawn.split("measured: ")[1]) for label in LABELS]
        heights[peak_bytes] = [float(label[1]) for label in found]
    budget_height, peak_height = heights[11.9 * MIB]
    assert peak_height == budget_height
    budget_height, peak_height = heights[6 * MIB]
    assert peak_height > budget_height + 20  # further down


def test_a_budget_of_which_a_step_takes_little_does_not_flatten_its_curve(tmp_path):
    heights = {}
    for budget_mib in (12, 6000):
        report(budget_bytes=budget_mib * MIB).plot(tmp_path / "step.svg")
        drawn = (tmp_path / "step.svg").read_text()
        label = re.search(
            rf' y="([\d.]+)"[^>]*>budget {budget_mib / 1024 if budget_mib > 1024 else budget_mib:.2f}', drawn
        )
        peak = re.search(r' y="([\d.]+)"[^>]*>peak 9.00 MiB<', drawn.split("measured: ")[1])
        ends = sorted(float(y) for y in re.findall(r' y="([\d.]+)"', drawn))
        heights[budget_mib] = float(peak[1])
        assert ends[0] <= float(label[1]) <= ends[-1]
    assert abs(heights[6000] - heights[12]) < 40


def test_the_kinds_of_a_whole_step_are_stacked(tmp_path):
    plain = timeline("predicted")
    held = [nbytes for _, nbytes in plain.memory]
    by_kind = {BufferKind.WEIGHT: tuple(n // 4 for n in held), BufferKind.ACTIVATION: tuple(n - n // 4 for n in held)}
    for kinds, names in ({}, []), (by_kind, ["parameters", "activations"]):
        whole = replace(plain, bytes_by_kind=kinds)
        write_picture(tmp_path / "step.svg", [whole], title="Small", budget_bytes=8 * MIB, peak_bytes={})
        drawn = (tmp_path / "step.svg").read_text()
        assert [name for name, _ in KINDS.values() if f">{name}<" in drawn] == names
        assert drawn.count("FillBetweenPolyCollection") == max(1, len(names))


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
