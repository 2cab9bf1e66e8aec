"""Prediction of a step of 1, 2, 4 … ranks that train together, and its presentation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.distributed.prediction.ddp_buckets import fill_buckets
from benchmarks.distributed.prediction.predict import RanksStep, predict_ranks
from benchmarks.distributed.prediction.ranks import Ranks
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import Program
from lmswap.planner import make_plan
from lmswap.reporting.text import format_seconds, render_text


@dataclass(frozen=True)
class Scaling:
    """The same step, with the same budget per rank, by increasing number of ranks; the first of ``steps`` has one."""

    program: Program
    steps: tuple[RanksStep, ...]

    def efficiency(self, step: RanksStep) -> float:
        """Return the share of its speed alone that a rank keeps in ``step``."""
        return self.steps[0].seconds / step.seconds


def plan_ranks(policy: str, program: Program, costs: OpCosts, machine: Machine, ranks: Ranks, **limits: Any) -> Scaling:
    """Plan for 1, 2, 4 … of ``ranks`` and for all of them; ``machine`` is a node, ``limits`` are passed to `make_plan`.

    Raises:
        PlanInfeasible, TierError: see `make_plan`.
    """
    plans: dict[Machine, Plan] = {}
    steps = []
    for some in _subsets(ranks):
        own = some.share_of(machine)
        if own not in plans:
            plans[own] = make_plan(policy, program, costs, own, **limits)
        about = {"tier": limits["tier"], "min_swap_bytes": limits["min_swap_bytes"]}
        steps.append(predict_ranks(plans[own], program, costs, own, some, **about))
    return Scaling(program, tuple(steps))


def _subsets(ranks: Ranks) -> list[Ranks]:
    """Return 1, 2, 4 … of ``ranks`` that fill whole nodes if there is more than one, and all of them."""
    counts = [count for power in range(ranks.count.bit_length()) if (count := 2**power) < ranks.count]
    whole = [count for count in counts if count <= ranks.in_node or count % ranks.in_node == 0]
    return [replace(ranks, count=count) for count in whole] + [ranks]


def ranks_figures(scaling: Scaling) -> dict[str, Any]:
    """Return what `--json` prints: schema "lmswap.plan.ranks/2", in bytes and seconds."""
    ranks = scaling.steps[-1].ranks
    buckets = fill_buckets(scaling.program)
    return {
        "schema": "lmswap.plan.ranks/2",
        "program": scaling.program.name,
        "network": ranks.network.name,
        "algorithm": ranks.network.algorithm,
        "gradient_bytes": sum(bucket.nbytes for bucket in buckets),
        "num_buckets": len(buckets),
        "ranks": [
            {
                "num_ranks": step.ranks.count,
                "step_seconds": step.seconds,
                "lower_bound_seconds": step.certificate.seconds,
                "without_network_seconds": step.alone_seconds,
                "all_reduce_seconds": step.all_reduce_seconds,
                "hidden_share": step.hidden_share,
                "efficiency": scaling.efficiency(step),
            }
            for step in scaling.steps
        ],
    }


def ranks_text(scaling: Scaling, machine: Machine, figures: dict[str, Any]) -> str:
    """Return what is printed without `--json`."""
    about = Table.grid(padding=(0, 2))
    about.add_row("program", f"{scaling.program.name}: {len(scaling.program.ops)} ops")
    about.add_row("machine", machine.name)
    about.add_row("network", f"{figures['network']}; all-reduce: {figures['algorithm']}")
    summed = f"{format_bytes(figures['gradient_bytes'])} in {figures['num_buckets']} buckets"
    about.add_row("gradients", f"{summed}, summed as the backward makes them")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("ranks", "step", "all-reduce", "hidden", "efficiency", "bound", "above it"):
        table.add_column(heading, justify="right")
    for step in scaling.steps:
        hidden, bound = step.hidden_share, step.certificate.seconds
        table.add_row(
            str(step.ranks.count),
            format_seconds(step.seconds),
            format_seconds(step.all_reduce_seconds),
            "–" if hidden is None else f"{100 * hidden:.1f} %",
            f"{100 * scaling.efficiency(step):.1f} %",
            format_seconds(bound),
            f"{100 * (step.seconds / bound - 1):.1f} %" if bound else "–",
        )
    return render_text(about, Text(), table, Text(), Text("Predicted from the rates of machine and network."))
