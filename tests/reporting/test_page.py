import importlib.util
import re
import shutil
import subprocess

import pytest

from lmswap.errors import OptionError
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.lives import lives
from tests.reporting.small_step import PLAN, PROGRAM, planned_report, report, timeline

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_a_buffer_lies_on_the_device_but_for_while_it_is_away():
    found = lives(PROGRAM, PLAN, timeline("predicted"))  # its last op begins at 4.5 s and ends at 5.5
    assert found == {
        1: ((0.0, 3.0), (3.0, 5.5)),  # leaves and comes back just before op 3
        2: ((1.0, 4.5),),
        3: ((2.0, 5.5),),  # handed to the caller
        4: ((3.0, 5.5),),
        5: ((3.0, 5.5),),
        6: ((4.5, 5.5),),
    }
    assert [row.resident for row in buffer_decisions(PROGRAM, PLAN)] == [()] * 6


def written(tmp_path):
    report().to_html(tmp_path / "step.html")
    return (tmp_path / "step.html").read_text()


def test_a_page_tells_of_each_buffer_and_lane_and_needs_no_network(tmp_path):
    page = written(tmp_path)
    drawn = page[page.rindex("Plotly.newPlot(") :]
    for words in ("memory, predicted", "memory, measured", "stall, measured", "buffers: swap", "buffers: keep"):
        assert words in drawn
    assert "budget 12.00 MiB" in drawn
    assert "small.py:8 x = self.conv(x)" in drawn
    assert "idle for 2 ops" in drawn
    assert re.findall(r"<(?:script|link)[^>]*(?:src|href)=", page) == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_the_page(tmp_path):
    written(tmp_path)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    seen = subprocess.run(
        [*command, f"--user-data-dir={tmp_path}", str(tmp_path / "step.html")],
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert len(re.findall(r'<g class="trace bars"', seen)) >= 8  # lanes, and buffers by decision
    for words in ("budget 12.00 MiB", "compute, measured", "conv · 3.00 MiB"):
        assert f">{words}</text>" in seen


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match=r"must end in \.html"):
        report().to_html(tmp_path / "step.htm")
    with pytest.raises(OptionError, match=r"folder '.*missing' does not exist"):
        report().to_html(tmp_path / "missing" / "step.html")
    with pytest.raises(OptionError, match="run a training step first"):
        planned_report(program=None, plan=None, predicted=None).to_html(tmp_path / "step.html")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"pip install 'lmswap\[page\]'"):
        report().to_html(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_a_notebooks_cell_shows_what_is_printed_and_keeps_a_line():
    cell = report()._repr_html_()
    assert "<pre" in cell
    assert [words for words in ("lmswap report: Small", "swapped out", "12.00 MiB") if words not in cell] == []
    assert len(cell) < 10_000
    assert repr(report()) == "<report of Small after 3 steps; print it, or see its fields>"
