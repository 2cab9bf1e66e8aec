"""The page of the case study: what it says, and how a browser shows it."""

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape, unescape

import pytest

from benchmarks.case_study import __main__ as command
from benchmarks.case_study import findings, tables
from benchmarks.case_study.page import HTML, MARKDOWN, write_pages
from benchmarks.case_study.results import Evaluation
from benchmarks.unet3d.scores import Score
from tests.benchmarks.case_study.studies import SETTINGS, make_ladder, make_links, make_results, swapped, unswapped

SCORES = tuple(
    Score(f"model-{size}", size, 128, f"Synthetic_{n:05d}", 0.5 + size / 1000 + n / 100, 0.6, math.nan if n else 0.7)
    for size in (96, 128)
    for n in range(4)
)
EVALUATED = Evaluation("evaluated", "synthetic tumours, not BraTS", SCORES)


@pytest.fixture(scope="module")
def results():
    return make_results(evaluation=EVALUATED)


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_pages(results, "results.json", folder)
    return folder


def cells(table):
    return {row[0]: row[1:] for row in table.rows}


def test_the_first_sentence_is_what_the_larger_image_costs():
    assert findings.headline(make_results()) == (
        "128³ under the 96³ budget costs 12.5 % over unlimited memory (median of 2 repeats, +10.0 to +15.0 %)."
    )
    quicker = replace(make_ladder(), runs=(unswapped(5.0), swapped(4.9)))
    assert findings.headline(make_results(ladder=quicker)) == (
        "128³ under the 96³ budget takes 2.0 % less than unlimited memory (one run)."
    )
    still = swapped(5.1)
    still = replace(still, swapping=replace(still.swapping, out_bytes=0, recomputed_bytes=0))
    idle = replace(make_ladder(), runs=(unswapped(5.0), still))
    assert findings.headline(make_results(ladder=idle)).endswith(
        "(one run). Nothing had to leave: the budget holds that size as it is, so this is noise."
    )
    assert findings.headline(make_results(ladder=None)) == "128³ under the 96³ budget: not yet measured."


def test_goals_are_judged_from_the_runs(results):
    found = cells(tables.goals(results))
    assert found["overhead at 3.3 (x86, PCIe gen3)"] == (
        "2.87 ×", "≤ 1.05 ×", "1.040 × [1.040, 1.040]", "0.36", "yes",
    )  # fmt: skip
    assert found["utilization at 3.3 (x86, PCIe gen3)"] == ("29.1 %", "≥ 95.0 %", "93.3 %", "3.21", "no")
    assert found["overhead at 0.9 (for 0.5, AC922, NVLink 2.0)"][-1] == "yes"
    assert found["on a GPU"] == ("not yet measured",)
    unmeasured = cells(tables.goals(make_results(links=None)))
    assert unmeasured["overhead at 3.3 (x86, PCIe gen3)"] == ("2.87 ×", "≤ 1.05 ×", "–", "–", "–")


def test_a_gpus_results_have_no_unmeasured_row():
    found = make_results(settings=replace(SETTINGS, device="cuda"))
    for table in (tables.goals, findings.ladder_table, tables.epoch_table, tables.profile_table):
        assert not any("GPU" in row[0] and "not yet measured" in row for row in table(found).rows)


def test_every_table_cell_has_ibms_figure_ours_and_their_ratio(results):
    boxes = cells(tables.box_table(results))
    assert boxes["mean"] == ("140 | 141 | 1.01", "171 | 172 | 1.01", "140 | 140 | 1.00")
    epochs = cells(tables.epoch_table(results))
    assert epochs["1 × 96³, no swapping"][0] == "216 | 912 | 4.22"  # 4.0 s × 228 steps
    assert epochs["1 × 128³, swapping"] == (
        "1467 | 2280 | 1.55", "1.00 × | 1.00 × | 1.00", "590 | 2280 | 3.86", "1.00 × | 1.00 × | 1.00",
    )  # fmt: skip
    contended = epochs["2 × 128³, swapping, more than there are links for (IBM: 8, 6)"]
    assert contended[:2] == ("2076 | 3420 | 1.65", "1.42 × | 1.50 × | 1.06")
    assert (
        epochs["2 × 128³, swapping, a link each (IBM: 4)"][2] == "600 | – | –"
    )  # a disk of one's own is not available
    profiled = cells(tables.profile_table(results))
    assert profiled["x86, PCIe gen3, a link each"] == (
        "29.1 % | 93.3 % | 3.21", "10.9 | 0.629 | 0.06", "11.7 | 0.629 | 0.05",
    )  # fmt: skip


def test_ops_that_stall_are_named_with_their_source_and_reason(results):
    first, *_ = findings.stall_table(results).rows
    assert first[1:] == (
        "convolution_backward_3", "network.py:31 y = conv(x)", "conv", "its bytes were not swapped in", "200.0",
    )  # fmt: skip
    note = findings.stall_table(results).note
    assert (
        "At 3.3 (x86, PCIe gen3) the step takes +0.20 s against unlimited memory: 0.10 s stalled, +0.00 s of " in note
    )
    assert (
        "the plan takes 1.071 × the step with unlimited memory, and none under this budget less than 1.054 ×." in note
    )


def test_waits_that_cost_nothing_are_not_listed():
    links = make_links()
    short = tuple(replace(stall, seconds=0.002) for stall in links.links[0].runs[0].stalls)  # of steps of 3 s
    calm = tuple(replace(link, runs=tuple(replace(run, stalls=short) for run in link.runs)) for link in links.links)
    found = findings.stall_table(make_results(links=replace(links, links=calm)))
    assert short and found.rows == (("–", "no op waited that long for a copy"),)


def test_the_page_names_unfinished_runs(tmp_path):
    from benchmarks.unet3d.measured import Failure

    ladder = replace(make_ladder(), failures=(Failure(unswapped(1.0, 256).configuration, "was <killed>"),))
    write_pages(make_results(ladder=ladder), "results.json", tmp_path)
    html = (tmp_path / HTML).read_text()
    assert "was &lt;killed&gt;" in html and "256³ unswapped" in html
    assert "was <killed>" in (tmp_path / MARKDOWN).read_text()


def test_stages_that_did_not_run_say_so_and_leave_no_picture(tmp_path):
    empty = make_results(boxes=None, predictions=None, ladder=None, links=None, replicas=None)
    written = write_pages(empty, "results.json", tmp_path)
    assert [path.name for path in written] == [MARKDOWN, HTML]
    assert (tmp_path / MARKDOWN).read_text().count("\nnot yet measured\n") == 5


def test_the_page_is_made_from_the_results_file_alone(results, page, tmp_path):
    results.write(tmp_path / "results.json")
    assert command.main(["--from", str(tmp_path / "results.json")]) == 0
    for name in (HTML, MARKDOWN, "steps.svg", "predicted_steps.trace.json"):
        assert (tmp_path / name).read_text() == (page / name).read_text()


def test_markdown_tables_are_whole_and_its_pictures_are_there(page):
    text = (page / MARKDOWN).read_text()
    assert text.splitlines()[2].startswith("**128³ under the 96³ budget costs 12.5 %")
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        heading, rule, *rows = (re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in block.splitlines())
        assert set(rule) == {"---"} and rows
        assert {len(row) for row in (heading, rule, *rows)} == {len(heading)}
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures == ["overhead.svg", "links.svg", "steps.svg", "predicted_steps.svg", "dice.svg"]
    for name in pictures:
        assert ET.parse(page / name).getroot().tag.endswith("svg")


def test_the_traces_are_in_the_format_of_perfetto(page):
    for name in ("measured", "predicted"):
        trace = json.loads((page / f"{name}_steps.trace.json").read_text())
        events = trace["traceEvents"]
        assert {event["pid"] for event in events} == {1, 2}
        assert {event["ph"] for event in events} <= {"M", "X", "C"}
        slices = [event for event in events if event["ph"] == "X"]
        assert {"compute", "out", "in"} <= {event["cat"] for event in slices}
        assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)


def test_lines_join_the_same_tensors_of_both_steps(page):
    assert "Lines join the 2 largest trips" in re.sub(r"\s+", " ", unescape(_comments(page / "steps.svg")))
    assert "Lines join the 24 largest trips" in _comments(page / "predicted_steps.svg")


def _comments(path):
    """matplotlib draws letters as shapes and leaves the text beside them as a comment."""
    return " ".join(re.findall(r"<!--(.*?)-->", path.read_text(), re.DOTALL))


# What a browser makes of the page, written where --dump-dom shows it.
_PROBE = """<script>addEventListener("load", () => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  const found = {
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    images: all("img").map((image) => [image.naturalWidth, image.naturalHeight, box(image).width, box(image).height]),
    outside: all("p, h1, h2, h3, .wide").filter((e) => box(e).left < 0 || box(e).right > innerWidth).length,
    smallest: Math.min(...all("td, th, p").map((element) => parseFloat(getComputedStyle(element).fontSize))),
    tables: all("table").map((table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.innerText))),
    headline: document.querySelector(".headline").innerText,
  };
  const element = parent.document.createElement("pre");
  element.id = "found";
  element.textContent = JSON.stringify(found);
  parent.document.body.append(element);
})</script>"""


@pytest.fixture(scope="module", params=[1280, 390], ids=["desktop", "phone"])
def shown(request, page, tmp_path_factory):
    """The page in headless Chromium: (what the probe found, what the console said, requested addresses)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: install chromium to have the page looked at")
    folder = tmp_path_factory.mktemp("browser")
    probed, log = folder / "page.html", folder / "net.json"
    # In a frame, for Chromium's own window cannot be as narrow as a phone.
    framed = escape((page / HTML).read_text().replace("</head>", f"{_PROBE}</head>"))
    style = f"width: {request.param}px; height: 900px; border: 0"
    probed.write_text(f'<!DOCTYPE html><meta charset="utf-8"><iframe style="{style}" srcdoc="{framed}"></iframe>')
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", f"--log-net-log={log}",
         "--dump-dom", f"file://{probed}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    found = json.loads(unescape(found))
    assert found["width"] == request.param
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    asked = re.findall(r'"url":"(https?://[^"]+)"', log.read_text())
    return found, said, asked


def test_the_page_loads_without_errors_or_network_requests(shown):
    _, said, asked = shown
    assert not said
    # Chromium itself may look for updates; the page may not ask anybody.
    assert not [url for url in asked if "google" not in url and "gvt1" not in url]


def test_a_browser_shows_every_picture_and_every_cell(shown, results):
    found, _, _ = shown
    assert len(found["images"]) == 5
    assert all(min(sides) > 100 for sides in found["images"])
    assert found["headline"] == findings.headline(results)
    expected = [
        table(results)
        for table in (
            tables.goals, findings.ladder_table, findings.promise_table, findings.link_table, findings.stall_table,
            tables.box_table, tables.epoch_table, tables.profile_table, tables.prediction_table, findings.dice_table,
        )
    ]  # fmt: skip
    assert found["tables"] == [[list(table.headings), *map(list, table.rows)] for table in expected]


def test_nothing_is_cut_off_on_a_desk_or_a_phone(shown):
    found, _, _ = shown
    assert found["overflow"] <= 0 and found["outside"] == 0
    assert found["smallest"] >= 12


def test_the_page_refers_to_nothing_outside_of_itself(page):
    text = (page / HTML).read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)[^"]*"', text)
    assert "url(" not in text and "@import" not in text
