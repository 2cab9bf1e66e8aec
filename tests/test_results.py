"""The figures of README and docs are those of the stored results, digit for digit."""

import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from benchmarks.case_study.together import predict_together
from benchmarks.conformance.results import read_results
from benchmarks.conformance.run import BREADTH
from benchmarks.conformance.table import render
from benchmarks.distributed.page import PAGE, filled
from lmswap.ir.bytesize import parse_bytes

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES)
GIB = 2**30
KINDS = {None: "plain torch", "none": "lmswap's graphs, unplanned", "auto": "lmswap"}

# A row of the table of predictions: its program and machine.
DESCRIBED = {
    "V100, PCIe gen3": ("unet3d_192", "v100_gen3"),
    "V100, NVLink 2.0": ("unet3d_192", "v100_nvlink2"),
    "H200, PCIe gen5, fp32 (30 % of its peak rate)": ("unet3d_192", "h200_gen5"),
    "H200, PCIe gen5, bf16 (10 %)": ("unet3d_192_bf16", "h200_gen5_bf16"),
    "GH200, C2C, fp32": ("unet3d_192", "gh200"),
    "V100, PCIe gen3, norms op by op as in Keras": ("unet3d_192_unfused", "v100_gen3"),
}
POLICIES = ("auto", "swap", "recompute", "tflms")


def table(page: str, first_headings: str) -> list[dict[str, str]]:
    """The rows of the table that begins with these headings: cells by heading, without emphasis."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    first = " *[|] ".join(map(re.escape, first_headings.split(" | ")))
    (found,) = re.findall(rf"^(\| {first} *\|(?:.*\n\|)+.*)$", text, re.MULTILINE)
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines())
    return [dict(zip(headings, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def runs():
    """The measured runs by the name that the tables give them, as the tables write them."""
    found = {}
    for file in ("unet3d_cpu", "unet3d_ladder_cpu"):
        stored = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
        for run in stored["runs"]:
            policy, swapping = run["configuration"]["policy"], run["swapping"]
            moved = [swapping["out_bytes"], swapping["in_bytes"]] if swapping else [0]
            found[f"{run['configuration']['size']}³, {KINDS[policy]}"] = {
                "budget": f"{stored['budget_bytes'] / GIB:.2f} GiB" if policy == "auto" else "–",
                "peak": f"{run['peak_bytes'] / GIB:.2f} GiB",
                "tensors": f"{run['tensor_peak_bytes'] / GIB:.2f} GiB",
                "step": f"{median(run['step_seconds'][1:]):.1f} s",
                "swapped out / in": f"{' / '.join(f'{each / GIB:.2f}' for each in moved)} GiB" if any(moved) else "–",
            }
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_quoted_measurements_are_the_stored_ones(page, runs):
    shown = {row.pop("run"): row for row in table(page, "run")}
    assert len(shown) >= 4
    assert shown == {name: {column: runs[name][column] for column in row} for name, row in shown.items()}


def test_quoted_predictions_are_the_stored_ones():
    outcomes = json.loads((RESULTS / "programs.json").read_text(encoding="utf-8"))["outcomes"]
    found = {}
    for name, (program, machine) in DESCRIBED.items():
        cases = {o["case"]["policy"]: o for o in outcomes if is_case(o["case"], program, machine, 42)}
        free_seconds = cases["auto"]["free_seconds"]
        plans = [cases[policy]["plan"] for policy in POLICIES]
        steps = [f"{plan['step_seconds'] / free_seconds:.3f}" if plan else "does not fit" for plan in plans]
        bound = f"{plans[0]['bound_seconds'] / free_seconds:.3f}"
        found[name] = [bound, *steps, f"{cases['auto']['planning_seconds']:.1f} s"]
    assert found == {row["machine"]: [*row.values()][1:] for row in table("docs/results.md", "machine")}


def test_ranks_are_predicted_as_the_page_states():
    page = (ROOT / "benchmarks" / "distributed" / "README.md").read_text(encoding="utf-8")
    rows = [str(row) for row in predict_together()]
    assert len(rows) == 3
    assert all(row in page.splitlines() for row in rows)


def test_the_tables_of_several_ranks_are_those_of_the_stored_results():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page, "run python -m benchmarks.distributed.page"


def is_case(case, program, machine, percent):
    return (case["program"], case["machine"], case["budget_percent"]) == (program, machine, percent)


def test_figures_that_stand_in_two_places_are_the_same():
    """README repeats the table of ranks."""
    of_ranks = table("benchmarks/results/distributed_cpu.md", "training | ranks | without all-reduce")
    for row in table("README.md", "training"):
        assert any(row.items() <= each.items() for each in of_ranks)


def conformance(path, *, breadth):
    outcomes = read_results(RESULTS / "conformance_cpu.json").outcomes
    return [o for o in outcomes if o.case.path == path and (o.case.package in BREADTH) == breadth]


def verdicts(outcomes):
    return Counter(outcome.finding.verdict for outcome in outcomes)


def claims_of_operators():
    hooks, graphs = (conformance(path, breadth=True) for path in ("hooks", "graphs"))
    assert len(hooks) == len(graphs)
    yield f"all {len(hooks)} cases, {sum(outcome.trials for outcome in hooks):,} samples:"
    found = verdicts(hooks)
    assert {*found} <= {"passed", "unmoved", "torch"}
    yield f"{found['passed']} equal; in {found['unmoved']} nothing moved, which is no evidence"
    found = verdicts(graphs)
    assert {*found} <= {"passed", "tracing", "unmoved", "torch"}
    yield f"{found['passed']} equal; {found['tracing']} as torch's own tracing rounds, or as the report says; "
    yield f"in {found['unmoved']} nothing moved; "


def claims_of_models():
    hooks, graphs = (verdicts(conformance(path, breadth=False)) for path in ("hooks", "graphs"))
    assert hooks.total() == graphs.total() and hooks["torch"] == graphs["torch"]
    yield f"| {graphs.total()}, through both paths."
    assert {*hooks} <= {"passed", "torch"}
    yield f"{hooks['passed']} equal to plain torch."
    assert {*graphs} <= {"passed", "tracing", "torch"}
    yield f"{graphs['passed']} equal; {graphs['tracing']} round otherwise"
    yield f"{graphs['torch']} do not train twice to the same bits in torch alone"


def claims_of_soak():
    record = json.loads((RESULTS / "soak_cpu.json").read_text())
    yield f"{record['steps']:,} steps: {record['survived']:,} survive, bitwise equal; "
    lost = record["lost_to"]
    kinds = {8: "eight"}[len(lost)]
    yield f"{sum(lost.values()):,} are lost to {kinds} kinds of faults"


def claims_of_fuzz():
    record = json.loads((RESULTS / "fuzz_cpu.json").read_text())
    yield f"{record['models']} models and {record['files']:,} damaged files"
    yield f"`make fuzz TIMES={record['times']}`"


def claims_of_judge():
    networks = json.loads((RESULTS / "judge_cpu.json").read_text())
    runs = [run for network in networks for run in network["runs"]]
    assert not [wrong for run in runs for wrong in run["broken"] if not wrong.startswith("used ")]
    figures = [run["figures"] for run in runs]
    moving = [each for each in figures if each["swapped_out_bytes"] or each["recomputed_bytes"]]
    used = min(each["measured_peak_bytes"] / each["budget_bytes"] for each in moving)
    off = max(abs(each["predicted_peak_bytes"] / each["measured_peak_bytes"] - 1) for each in figures)
    yield f"{len(runs)} runs of {len(networks)} networks"
    yield f"at least {100 * used:.1f} % of it used by the {len(moving)} that move anything"
    yield f"peaks predicted within {100 * off:.2f} %"


CLAIMS = [claims_of_operators, claims_of_models, claims_of_soak, claims_of_fuzz, claims_of_judge]


@pytest.mark.parametrize("claims", CLAIMS)
def test_claims_on_conformance_soak_and_fuzzing_match_stored_results(claims):
    for claim in claims():
        assert claim in TEXT, claim


def test_the_page_of_conformance_is_that_of_its_results():
    page = (RESULTS / "conformance_cpu.md").read_text(encoding="utf-8")
    assert render(read_results(RESULTS / "conformance_cpu.json")) == page


WAYS = {
    "plain torch": "plain torch",
    "no budget": "without a budget",
    "70 %": "70%",
    "50 %": "50%",
    "40 %": "40%",
}  # as pages call them


@pytest.fixture(scope="module")
def seen_on_a_gpu():
    """By network and way, as tables write them."""
    found = {}
    for network, file in (("unet3d", "stalls"), ("resnet50", "speed_resnet50")):
        stored = json.loads((RESULTS / "h200" / f"{file}.json").read_text(encoding="utf-8"))
        runs = {run["way"]: run for run in stored["networks"][network] if "seconds" in run}
        steps = {way: median(run["seconds"]) for way, run in runs.items()}
        for title, way in WAYS.items():
            if way not in runs:
                continue
            run, report = runs[way], runs[way].get("report")
            is_bound = isinstance(run.get("budget_bytes"), int)
            share = f"{100 * run['reserved_bytes'] / run['budget_bytes']:.1f} % of budget" if is_bound else ""
            moved = [report[name] for name in ("swapped_out_bytes", "recomputed_bytes")] if report else None
            found[network, title] = {
                "reserved": share or f"{run['reserved_bytes'] / GIB:.2f} GiB",
                "step": f"{1e3 * steps[way]:.1f} ms",
                "over plain torch": f"{steps[way] / steps['plain torch']:.3f} ×" if report else "",
                "over no budget": f"{steps[way] / steps['without a budget']:.3f} ×" if is_bound else "",
                "moved out / again": [f"{nbytes / GIB:.2f} GiB" if nbytes else "–" for nbytes in moved or ()],
            }
            assert all(run.get("same", {"": True}).values())
    return found


HEADLINE = {
    "192³, plain torch": ("unet3d", "plain torch"),
    "192³, no budget": ("unet3d", "without a budget"),
    "192³ in the memory of 144³": ("unet3d", "in the smaller's memory"),
    "192³ in bf16 in the memory of 144³": ("unet3d_bf16", "in the smaller's memory"),
    "fp32, plain torch": ("unet3d", "plain torch"),
    "fp32, no budget": ("unet3d", "without a budget"),
    "fp32, in 6.52 GiB": ("unet3d", "in the smaller's memory"),
    "bf16, plain torch": ("unet3d_bf16", "plain torch"),
    "bf16, no budget": ("unet3d_bf16", "without a budget"),
    "bf16, in 3.34 GiB": ("unet3d_bf16", "in the smaller's memory"),
}


@pytest.mark.parametrize(("page", "column"), [("README.md", "H200"), ("docs/results.md", "at 192³")])
def test_the_headline_s_figures_are_those_that_were_stored(page, column):
    stored = json.loads((RESULTS / "h200" / "headline.json").read_text(encoding="utf-8"))["networks"]
    rows = table(page, column)
    assert {row[column] for row in rows} <= HEADLINE.keys() and len(rows) >= 4
    for row in rows:
        network, way = HEADLINE[row[column]]
        runs = {run["way"]: run for run in stored[network]}
        run, plain = runs[way], median(runs["plain torch"]["seconds"])
        assert all(run.get("same", {"": True}).values())
        seconds, report, budget_bytes = median(run["seconds"]), run.get("report"), run.get("budget_bytes")
        assert row["step"].strip("*") == f"{1e3 * seconds:.1f} ms"
        is_bound = isinstance(budget_bytes, int)
        budget = f"{budget_bytes / GIB:.2f} GiB" if is_bound else "–"
        assert row["reserved"] == f"{run['reserved_bytes'] / GIB:.2f} GiB"
        assert row.get("budget", budget) == budget and (not is_bound or budget in row.get("budget", row[column]))
        if report is None:
            continue
        assert row["over plain torch"] == f"{seconds / plain:.3f} ×"
        predicted = f"{1e3 * report['predicted_seconds']:.1f} ms, {1e3 * report['measured_seconds']:.1f} ms"
        assert row.get("forward and backward of the last step: predicted, measured", predicted) == predicted
        for name, nbytes in (("swapped out", "swapped_out_bytes"), ("recomputed", "recomputed_bytes")):
            assert row.get(name, "–") in (f"{report[nbytes] / GIB:.2f} GiB", "–")


def test_sizes_that_are_predicted_for_cards_follow_from_the_headline():
    stored = json.loads((RESULTS / "h200" / "headline.json").read_text(encoding="utf-8"))["networks"]
    needed = {}
    for dtype, network in (("fp32", "unet3d"), ("bf16", "unet3d_bf16")):
        runs = {run["way"]: run for run in stored[network]}
        needed[f"{dtype}, plain torch"] = runs["plain torch"]["reserved_bytes"]
        needed[f"{dtype}, lmswap"] = runs["in the smaller's memory"]["budget_bytes"]
    rows = table("docs/gpu.md", "card | budget")
    assert len(rows) == 5
    for row in rows:
        budget_bytes = parse_bytes(row["budget"], what="the budget")
        for column, nbytes in needed.items():
            side = 192 * (budget_bytes / nbytes) ** (1 / 3)
            side = min(side, (2**31 / 32) ** (1 / 3))  # the largest tensors have 32 channels
            assert row[column] == f"{int(side) // 16 * 16}³", (row["card"], column)


STEPS = {
    "ResNet-50, 64 × 224²": "resnet50",
    "GPT-2 medium, 8 × 1024 tokens": "gpt",
    "ViT-B/16, 64 × 224²": "vit",
    "3D U-Net, 192³": "unet3d_192",
}


def test_steps_that_are_predicted_for_a_gpu_are_those_stored():
    outcomes = json.loads((RESULTS / "programs.json").read_text(encoding="utf-8"))["outcomes"]
    rows = table("docs/gpu.md", "step | its tensors")
    assert {row["step"] for row in rows} == STEPS.keys()
    for row in rows:
        for percent in (50, 30):
            (found,) = (
                o
                for o in outcomes
                if is_case(o["case"], STEPS[row["step"]], "h200_gen5", percent) and o["case"]["policy"] == "auto"
            )
            assert row[f"in {percent} %"] == f"{found['plan']['step_seconds'] / found['free_seconds']:.3f} ×"
            assert row["its tensors"] == f"{found['budget_bytes'] / percent * 100 / GIB:.2f} GiB"


def test_the_tables_figures_of_a_gpu_are_those_that_were_stored(seen_on_a_gpu):
    rows, network = table("docs/results.md", "network |  | step"), ""
    assert len(rows) == len(seen_on_a_gpu)
    for row in rows:
        network = row["network"] or network
        found = seen_on_a_gpu["unet3d" if network.startswith("3D U-Net") else "resnet50", row[""]]
        assert row["reserved"].startswith(found["reserved"])
        assert [row[name] for name in ("swapped out", "recomputed")] == (found["moved out / again"] or ["", ""])
        for name in ("step", "over plain torch", "over no budget"):
            assert row[name] == found[name]
