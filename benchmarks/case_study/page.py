"""Results → a Markdown page with its pictures, and one self-contained HTML page."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from benchmarks.case_study import findings, pictures, tables
from benchmarks.case_study.cells import NOT_YET, Table, link_overhead
from benchmarks.case_study.predict import MACHINE_OF_SYSTEM, OURS
from benchmarks.case_study.published import SYSTEMS
from benchmarks.case_study.ratios import Spread
from benchmarks.case_study.results import Results
from lmswap.ir.emulation import PRESETS
from lmswap.ir.timeline import Timeline
from lmswap.reporting.chrome import write_chrome_trace

MARKDOWN, HTML = "case_study.md", "case_study.html"


@dataclass(frozen=True)
class Picture:
    """An SVG and what it shows; ``name`` is its file's."""

    name: str
    title: str
    note: str
    svg: str

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode()


@dataclass(frozen=True)
class Section:
    """A part of the page: pictures above tables. ``missing`` says what is not there."""

    title: str
    pictures: tuple[Picture, ...]
    tables: tuple[Table, ...]
    missing: str = ""


def write_pages(results: Results, results_file: str, folder: Path) -> list[Path]:
    """Writes the pages, the pictures and the Chrome traces of the drawn steps; returns what was written."""
    sections = _sections(results)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = []
    for picture in (picture for section in sections for picture in section.pictures):
        written.append(folder / picture.name)
        written[-1].write_text(picture.svg, encoding="utf-8")
    content = {
        "headline": findings.headline(results),
        "results": results,
        "results_file": results_file,
        "sections": sections,
    }
    for name in (MARKDOWN, HTML):
        written.append(folder / name)
        written[-1].write_text(environment.get_template(f"{name}.jinja").render(content), encoding="utf-8")
    return written + _write_traces(results, folder)


def _sections(results: Results) -> tuple[Section, ...]:
    return (
        _section("What was to be reached", (), tables.goals(results)),
        _section(
            "A larger image in the same memory",
            _curve(results),
            findings.ladder_table(results),
            findings.promise_table(results),
        ),
        _section(
            "A fast link and a slow one",
            (*_links(results), *_two_steps(results)),
            findings.link_table(results),
            findings.stall_table(results),
        ),
        _section(
            "The case study's tables",
            (),
            tables.box_table(results),
            tables.epoch_table(results),
            tables.profile_table(results),
        ),
        _section("The answer without the machine", _two_predicted_steps(results), tables.prediction_table(results)),
        _section("What the larger image is good for", _dice(results), findings.dice_table(results)),
        *([] if (failures := findings.failure_table(results)) is None else [Section("Failures", (), (failures,))]),
    )


def _section(title: str, drawn: tuple[Picture, ...], *found: Table | None) -> Section:
    present = tuple(table for table in found if table is not None)
    return Section(title, drawn, present, "" if drawn or present else NOT_YET)


def _curve(results: Results) -> tuple[Picture, ...]:
    if results.ladder is None:
        return ()
    costs = [(size, findings.ladder_overhead(results.ladder, size)) for size in results.settings.sizes]
    points = [(size, cost) for size, cost in costs if cost is not None]
    if not points:
        return ()
    note = (
        "IBM's points are its epochs at 192³ over 2.37 times those at 144³; its curve between them was published as a "
        "picture only."
    )
    svg = pictures.draw_curve(points, results.settings.small)
    return (Picture("overhead.svg", "Overhead over unlimited memory by size", note, svg),)


def _links(results: Results) -> tuple[Picture, ...]:
    if results.links is None:
        return ()
    rows: list[tuple[str, str, Spread | None]] = []
    for system in SYSTEMS:
        rows.append((system.name, "IBM, 2018", Spread.of([system.overhead])))
        for policy, whose in (("tflms", "TFLMS policy, our runtime"), ("auto", "lmswap")):
            rows.append((system.name, whose, link_overhead(results, system.key, policy)))
    rows += [(name, "lmswap", link_overhead(results, name)) for name in PRESETS if results.links.of(name) is not None]
    title = "The same size and budget over each link"
    note = "Dashed: unlimited memory. Thin lines: lowest and highest of the repeats. Links are set by ratio, as below."
    return (Picture("links.svg", title, note, pictures.draw_links(rows)),)


def _two_steps(results: Results) -> tuple[Picture, ...]:
    steps = _measured_steps(results)
    if len(steps) != 2:
        return ()
    note = "Measured; the last step of the last repeat over each link."
    title = "One step over two links, the same tensors joined"
    return (Picture("steps.svg", title, note, pictures.draw_two_steps(steps)),)


def _measured_steps(results: Results) -> list[tuple[str, Timeline]]:
    """(title, timeline) of the drawn step over the link of each system."""
    found = []
    for system in SYSTEMS:
        link = results.links.of(system.key) if results.links else None
        drawn = [run.swapping for run in link.of("auto") if run.swapping and run.swapping.spans] if link else []
        if link and drawn:
            found.append((f"transfer / compute {link.ratio:.2g}, for {system.name}", drawn[-1].timeline))
    return found


def _two_predicted_steps(results: Results) -> tuple[Picture, ...]:
    steps = _predicted_steps(results)
    if not steps:
        return ()
    title = "The same, predicted for 192³ on the case study's machines"
    note = "By the simulator, from rooflines: nothing of this was measured."
    return (Picture("predicted_steps.svg", title, note, pictures.draw_two_steps(steps)),)


def _predicted_steps(results: Results) -> list[tuple[str, Timeline]]:
    if results.predictions is None:
        return []
    found = []
    for system in SYSTEMS:
        prediction = results.predictions.find(MACHINE_OF_SYSTEM[system.key], OURS)
        found.append((prediction.machine_name, Timeline("predicted", prediction.spans, ())))
    return found


def _dice(results: Results) -> tuple[Picture, ...]:
    if results.evaluation is None:
        return ()
    note = (
        f"From the scores in {results.evaluation.folder}. The case study's box plots were published as pictures only."
    )
    title = "Dice by region and image size"
    return (Picture("dice.svg", title, note, pictures.draw_dice(results.evaluation)),)


def _write_traces(results: Results, folder: Path) -> list[Path]:
    """Writes the drawn steps as trace files for Perfetto; returns their paths."""
    written = []
    for name, steps in (("measured", _measured_steps(results)), ("predicted", _predicted_steps(results))):
        if steps:
            written.append(folder / f"{name}_steps.trace.json")
            timelines = [Timeline(f"{name}: {title}", timeline.spans, ()) for title, timeline in steps]
            write_chrome_trace(
                written[-1], timelines, about={"model": "UNet3d", "commit": results.origin.machine.commit}
            )
    return written
