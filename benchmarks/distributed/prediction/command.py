"""`python -m benchmarks.distributed predict`: the cost of 1, 2, 4 … ranks that train a captured program together."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from benchmarks.distributed.prediction.network import PRESETS, Network
from benchmarks.distributed.prediction.ranks import Ranks
from benchmarks.distributed.prediction.scaling import plan_ranks, ranks_figures, ranks_text
from lmswap.analyze.cost import roofline
from lmswap.analyze.memory import StepMemory
from lmswap.cli.plan import read_parsed, this_machine
from lmswap.cli.step_plan import parse_step_budget
from lmswap.errors import OptionError
from lmswap.ir.bytesize import parse_bytes
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program
from lmswap.planner import POLICIES
from lmswap.reporting.text import print_result

_NETWORKS = f"a file, or one of {', '.join(PRESETS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those that `lmswap plan` has mean the same, the budget is that of each rank."""
    parser.add_argument("program", metavar="PROGRAM.json[.gz]", help="written by lmswap.program(model).to_json()")
    parser.add_argument("--budget", required=True, help='of each rank: "6GiB", or "40%%" of the unplanned peak')
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="predict 1, 2, 4 … N ranks")
    parser.add_argument("--network", required=True, metavar="FILE|NAME", help=_NETWORKS)
    parser.add_argument("--machine", metavar="FILE", help="a node's description; default: measure this machine")
    parser.add_argument("--policy", default="auto", help=f"one of {', '.join(POLICIES)} (%(default)s)")
    parser.add_argument("--tier", choices=("host", "disk", "compressed", "peer"), help="default: the machine's first")
    parser.add_argument("--min-swap", default="1MiB", metavar="BYTES", help="smaller buffers stay (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Print a row of the prediction, or its figures, for each number of ranks.

    Raises:
        OptionError: an argument or a file is not valid.
        PlanInfeasible, TierError: see `lmswap.planner.make_plan`.
    """
    min_swap_bytes = parse_bytes(options.min_swap, what="--min-swap")
    program = read_parsed(options.program, Program.from_json)
    machine = read_parsed(options.machine, Machine.from_json) if options.machine else this_machine(options.tier)
    costs = roofline(program, machine)
    budget_bytes = parse_step_budget(options.budget, StepMemory(program, costs))
    limits: dict[str, Any] = {
        "budget_bytes": budget_bytes - program.fixed_memory.total_bytes(),
        "tier": options.tier or machine.tiers[0].name,
        "min_swap_bytes": min_swap_bytes,
    }
    scaling = plan_ranks(
        options.policy, program, costs, machine, Ranks(options.ranks, _network(options.network)), **limits
    )
    figures = ranks_figures(scaling)
    print_result(json.dumps(figures, indent=1) if options.json else ranks_text(scaling, machine, figures))
    return 0


def _network(name: str) -> Network:
    if name not in PRESETS and not os.path.lexists(name):
        raise OptionError(f"no network is called '{name}', and no file: --network takes {_NETWORKS}")
    return PRESETS.get(name) or read_parsed(name, Network.from_json)
