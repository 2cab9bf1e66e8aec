"""Cost and benefit of planning for a slower link: `python -m benchmarks.programs.slack`.

Each case is planned for the link's full rate and for `PLANNED_LINK_SHARE` of it; both plans are then simulated on the
machine as it is, and on one whose link is 10 % and 20 % slower than it was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.programs.corpus import load_machine, load_program
from benchmarks.programs.replay import MIN_SWAP_BYTES
from benchmarks.unet3d.files import write_text
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.planner import make_plan, simulate
from lmswap.planner.problem import PLANNED_LINK_SHARE

STORED = Path(__file__).parents[1] / "results" / "programs_slack.json"
CASES = (
    ("unet3d_192", "v100_gen3"),
    ("unet3d_192", "h200_gen5"),
    ("unet3d_192_bf16", "h200_gen5_bf16"),
    ("unet3d_192", "gh200"),
)
BUDGET_PERCENT = 42  # what the U-Net at 144³ needs, of what it needs at 192³
LINK_RATES = (1.0, 0.9, 0.8)


def main() -> int:
    """Plans, simulates, prints and stores."""
    rows = [row for program, machine in CASES for row in measure(program, machine)]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("program", "machine", "planned for"):
        table.add_column(heading)
    for rate in LINK_RATES:
        table.add_column(f"link at {rate:.0%}", justify="right")
    for row in rows:
        over_free = [f"{seconds / row['free_seconds']:.4f}" for seconds in row["step_seconds"]]
        table.add_row(row["program"], row["machine"], f"{row['link_share']:.0%}", *over_free)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    write_text(STORED, json.dumps({"budget_percent": BUDGET_PERCENT, "link_rates": LINK_RATES, "rows": rows}, indent=1))
    return 0


def measure(program_name: str, machine_name: str) -> list[dict[str, object]]:
    """One row for each rate that is planned for: predicted seconds at each rate that the link may turn out to have."""
    program, machine = load_program(program_name), load_machine(machine_name)
    costs = roofline(program, machine)
    rows: list[dict[str, object]] = []
    for link_share in (1.0, PLANNED_LINK_SHARE):
        plan = make_plan(
            "auto",
            program,
            costs,
            machine,
            budget_bytes=StepMemory(program, costs).peak.nbytes * BUDGET_PERCENT // 100,
            tier=machine.tiers[0].name,
            min_swap_bytes=MIN_SWAP_BYTES,
            link_share=link_share,
        )
        seconds = [simulate(program, costs, machine.with_links_at(rate), plan).seconds for rate in LINK_RATES]
        rows.append(
            {
                "program": program_name,
                "machine": machine_name,
                "link_share": link_share,
                "free_seconds": costs.free_seconds,
                "step_seconds": seconds,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
