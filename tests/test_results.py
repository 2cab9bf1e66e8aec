"""The figures of README and docs are those of the stored results, digit for digit."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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


def table(page: str, first_heading: str) -> list[dict[str, str]]:
    """The rows of the table that begins with this heading: cells by heading, without emphasis."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    (found,) = re.findall(rf"^(\| {re.escape(first_heading)} \|(?:.*\n\|)+.*)$", text, re.MULTILINE)
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
                "moved out / in": f"{' / '.join(f'{each / GIB:.2f}' for each in moved)} GiB" if any(moved) else "–",
            }
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_what_was_measured_is_what_is_stored(page, runs):
    shown = {row.pop("run"): row for row in table(page, "run")}
    assert len(shown) >= 7
    assert shown == {name: {column: runs[name][column] for column in row} for name, row in shown.items()}


def test_what_was_predicted_is_what_is_stored():
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


def is_case(case, program, machine, percent):
    return (case["program"], case["machine"], case["budget_percent"]) == (program, machine, percent)


def test_figures_that_stand_in_two_places_are_the_same():
    """The comparison repeats the peers, README the ladder."""
    peers = {row["model"]: row for row in table("docs/results.md", "model | lmswap")}
    for row in table("docs/comparison.md", "model"):
        assert row.items() <= peers[row["model"]].items()
