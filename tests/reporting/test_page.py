import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from lmswap.errors import OptionError
from lmswap.ir.program import BufferKind
from lmswap.ir.timeline import Lane, Span, Timeline
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.resident_intervals import resident_intervals
from tests.reporting.small_step import MIB, PLAN, PROGRAM, planned_report, report, timeline

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


LIVES = {
    1: ((0.0, 3.0), (3.0, 5.5)),  # swapped out, and swapped in just before op 3
    2: ((1.0, 4.5),),
    3: ((2.0, 5.5),),  # handed to the caller
    4: ((3.0, 5.5),),
    5: ((3.0, 5.5),),
    6: ((4.5, 5.5),),
}


def test_a_buffer_is_resident_except_while_it_is_swapped_out():
    found = resident_intervals(PROGRAM, PLAN, timeline("predicted"))  # its last op begins at 4.5 s and ends at 5.5
    assert found == (LIVES, "predicted")
    assert [row.resident for row in buffer_decisions(PROGRAM, PLAN)] == [()] * 6


def test_buffers_of_a_step_that_ran_as_planned_are_drawn_by_its_clock():
    ran = (("forward 7", 10, 16), ("backward 7", 20, 22), ("backward 7", 30, 32))  # waits in its backward
    measured = Timeline("measured", tuple(Span(Lane.COMPUTE, *span) for span in ran), ())
    # Forward ops of 1 s take 2, those of the backward 2 of the 4 in which nothing waits.
    assert resident_intervals(PROGRAM, PLAN, timeline("predicted"), measured) == (
        {
            1: ((10, 20), (20, 32)),
            2: ((12, 30),),
            3: ((14, 32),),
            4: ((20, 32),),
            5: ((20, 32),),
            6: ((30, 32),),
        },
        "measured",
    )
    again = replace(measured, spans=(*measured.spans, Span(Lane.COMPUTE, "forward 7", 40, 46)))
    assert resident_intervals(PROGRAM, PLAN, timeline("predicted"), again) == (LIVES, "predicted")
    assert {row.clock for row in buffer_decisions(PROGRAM, PLAN, timeline("predicted"), measured)} == {"measured"}


def written(tmp_path, **changes):
    report(**changes).to_html(tmp_path / "step.html")
    return (tmp_path / "step.html").read_text()


def drawn(page):
    return json.loads(re.search(r'<script type="application/json" id="step">(.*)</script>', page)[1])


def rendered(tmp_path, page):
    """The elements of a page after its script has run in a browser."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    return subprocess.run(
        [*command, f"--user-data-dir={tmp_path}", str(page)], capture_output=True, text=True, timeout=120
    ).stdout


def test_a_page_has_each_buffer_and_lane_and_needs_no_network(tmp_path):
    page = written(tmp_path, unplanned_step_bytes=8 * MIB)
    step = drawn(page)
    assert "<title>Small on cpu (unit machine): policy swap_all, tier disk</title>" in page
    assert '<meta name="viewport"' in page
    assert step["summary"] == [
        ["peak", "9.00 MiB, 10.00 MiB predicted"],
        ["budget", "12.00 MiB (growth of resident memory since enable)"],
        ["saved", "2.00 MiB"],
        ["step", "6.00 s, 5.50 s predicted"],
    ]
    assert [lane["label"] for lane in step["lanes"]] == [
        f"{lane}, {source}" for lane in ("compute", "stall", "out", "in") for source in ("predicted", "measured")
    ]
    assert len({*step["sources"].values(), *step["decisions"].values()}) == 4  # keep and swap; none is recomputed
    (conv,) = [buffer for buffer in step["buffers"] if buffer["label"].startswith("conv")]
    assert (conv["label"], conv["decision"]) == ("conv · 3.00 MiB", "swap")
    assert conv["about"][:2] == ["idle for 2 ops", "made by aten.convolution.default small.py:8 x = self.conv(x)"]
    assert re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org)", page) == []


def test_the_time_between_the_passes_is_drawn_as_no_part_of_the_model(tmp_path):
    spans = (Span(Lane.COMPUTE, "forward 0", 0, 2), Span(Lane.COMPUTE, "backward 0", 3, 6))
    step = drawn(written(tmp_path, measured=Timeline("measured", spans, ())))
    (lane,) = [lane for lane in step["lanes"] if lane["label"] == "compute, measured"]
    assert [span[:3] for span in lane["spans"]][-1] == [
        pytest.approx(1e6 / 3, abs=1),
        pytest.approx(1e6 / 6, abs=1),
        -1,
    ]


def test_a_page_stays_small_however_many_ops_there_are(tmp_path):
    spans = tuple(
        Span(lane, f"{lane} of a module with a long name {number}", number, number + 0.5, 2**30)
        for lane in (Lane.COMPUTE, Lane.STALL, Lane.OUT, Lane.IN)
        for number in range(5_000)
    )
    memory = tuple((number / 2, 2**30 + number) for number in range(10_000))
    many = Timeline("measured", spans, memory)
    size = len(written(tmp_path, measured=many, predicted=replace(many, source="predicted")))
    assert size < 10**6


def test_the_kinds_of_a_whole_step_add_up_to_its_memory(tmp_path):
    held = tuple((number, 1000 + number * 37 % 500) for number in range(10_000))  # neighbours are merged
    weights = tuple(nbytes // 3 for _, nbytes in held)
    rest = tuple(nbytes - nbytes // 3 for _, nbytes in held)
    whole = Timeline("measured", (), held, bytes_by_kind={BufferKind.WEIGHT: weights, BufferKind.ACTIVATION: rest})
    curves = {curve["source"]: curve for curve in drawn(written(tmp_path, measured=whole))["memory"]}
    kinds = curves["measured"]["kinds"]
    assert [kind["name"] for kind in kinds] == ["parameters", "activations"]
    sums = [sum(nbytes) for nbytes in zip(*(kind["nbytes"] for kind in kinds), strict=True)]
    assert sums == [nbytes for _, nbytes in curves["measured"]["points"]]
    assert max(sums) == max(nbytes for _, nbytes in held)
    assert curves["predicted"]["kinds"] == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_stacks_the_kinds_of_a_whole_step(tmp_path):
    plain = timeline("measured")
    held = [nbytes for _, nbytes in plain.memory]
    by_kind = {BufferKind.WEIGHT: tuple(n // 4 for n in held), BufferKind.ACTIVATION: tuple(n - n // 4 for n in held)}
    written(tmp_path, measured=replace(plain, bytes_by_kind=by_kind))
    seen = rendered(tmp_path, tmp_path / "step.html")
    assert seen.count('fill-opacity="') == 2
    assert seen.count("<path ") == 5  # the two kinds, the two curves, and the budget
    assert ">parameters</span>" in seen


def test_names_with_any_characters_are_text(tmp_path):
    evil = "</script><script>alert('@step@')</script><b>"
    page = written(tmp_path, model=evil)
    assert evil not in page
    assert drawn(page)["title"].startswith(evil)
    assert page.count("<script") == page.count("</script") == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_draws_the_page_and_shows_the_hovered_buffer(tmp_path):
    page = written(tmp_path)
    point = """<script>
      const bars = [...document.querySelectorAll("rect")];
      bars.at(-1).dispatchEvent(new PointerEvent("pointermove", {bubbles: true}));
    </script></body>"""
    (tmp_path / "pointed.html").write_text(page.replace("</body>", point))
    seen = rendered(tmp_path, tmp_path / "pointed.html")
    step = drawn(page)
    num_spans = sum(len(lane["spans"]) for lane in step["lanes"])
    assert seen.count("<rect ") == num_spans + sum(len(buffer["bars"]) for buffer in step["buffers"])
    assert seen.count("<path ") == 3  # the two curves and the budget
    for words in (
        "budget",
        "compute, measured",
        "conv · 3.00 MiB",
        "12.00 MiB (growth of resident memory since enable)",
    ):
        assert f">{words}</" in seen
    about = seen[seen.index('<div id="about"') :]
    assert "<div>keep: a gradient</div><div>on the device for 1 s from 4.5 s (predicted)</div>" in about


def test_an_unwritable_path_is_refused_before_the_page_is_made(tmp_path):
    with pytest.raises(OptionError, match=r"must end in \.html"):
        report().to_html(tmp_path / "step.htm")
    with pytest.raises(OptionError, match=r"folder '.*missing' does not exist"):
        report().to_html(tmp_path / "missing" / "step.html")
    with pytest.raises(OptionError, match="run a training step first"):
        planned_report(program=None, plan=None, predicted=None).to_html(tmp_path / "step.html")
    assert list(tmp_path.iterdir()) == []


def test_a_notebooks_cell_shows_what_is_printed_and_keeps_a_line():
    cell = report()._repr_html_()
    assert "<pre" in cell
    assert [words for words in ("lmswap report: Small", "swapped out", "12.00 MiB") if words not in cell] == []
    assert len(cell) < 10_000
    assert repr(report()) == "<report of Small after 3 steps; print it, or see its fields>"
