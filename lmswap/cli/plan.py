"""`lmswap plan`: predicts the cost of a step under a budget, on this machine or another, without running it."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table
from rich.text import Text

from lmswap.cli.model import add_model_options, trace_model
from lmswap.cli.whole_step import add_step_options, step_figures, step_rows, whole_step
from lmswap.errors import LmswapError, OptionError, PlanInfeasible, without_path
from lmswap.files import read_text
from lmswap.ir.bytesize import (
    SHARE,
    format_bytes,
    min_share_taken,
    parse_budget,
    parse_bytes,
    parse_share,
    unit_of,
)
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Decision, Plan
from lmswap.ir.program import Program
from lmswap.ir.timeline import Timeline
from lmswap.planner import POLICIES
from lmswap.reporting import make_explanation
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.page import ENDING, write_page
from lmswap.reporting.text import format_excess, format_seconds, print_result, render_text

if TYPE_CHECKING:
    from lmswap.analyze.memory import StepMemory
    from lmswap.cli import Commands

_Parsed = TypeVar("_Parsed")
_WHOLE = "the unplanned peak"  # of which a budget may be a share


def add_to(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plan",
        help="plan a model or a program file under a budget, without running it",
        epilog="example: lmswap plan --model train:make_model --batch 2x4096 --budget 24GiB --optimizer adamw",
    )
    parser.add_argument(
        "program", nargs="?", metavar="PROGRAM.json[.gz]", help="written by lmswap.program(model).to_json() or --save"
    )
    add_model_options(parser)
    add_step_options(parser)
    parser.add_argument(
        "--budget",
        required=True,
        help='as of lmswap.enable: "6GiB", "800 MB", or "40%%" of what the step\'s tensors take unplanned',
    )
    parser.add_argument("--machine", metavar="FILE", help="a machine description; default: measure this machine")
    parser.add_argument(
        "--policy", default="auto", help=f"one of {', '.join(POLICIES)}; default: auto, the fastest that fits"
    )
    parser.add_argument(
        "--effort", type=int, default=1, metavar="N", help="search N times as long as usual; for policy auto"
    )
    parser.add_argument("--tier", choices=("host", "disk", "compressed", "peer"), help="default: the machine's first")
    parser.add_argument("--min-swap", metavar="BYTES", default="1MiB", help="smaller buffers stay; default: 1MiB")
    for moved in ("--ranks", "--network"):  # to benchmarks.distributed, which `run` names for one release
        parser.add_argument(moved, help=argparse.SUPPRESS)
    parser.add_argument("--all-buffers", action="store_true", help="print all buffers, not the ten largest")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the predicted step as a page, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, and print the plan or its figures."""
    from lmswap.analyze.cost import roofline
    from lmswap.analyze.memory import StepMemory
    from lmswap.planner import simulate

    if options.ranks is not None or options.network is not None:
        command = shlex.join(["python", "-m", "benchmarks.distributed", "predict", *options.words[1:]])
        raise OptionError(f"--ranks and --network have moved out of the package; in a checkout, run: {command}")
    page = check_can_write(options.html, ENDING) if options.html else None
    min_swap_bytes = parse_bytes(options.min_swap, what="--min-swap")
    machine = read_parsed(options.machine, Machine.from_json) if options.machine else this_machine(options.tier)
    if (options.program is None) == (options.model is None):
        raise OptionError("plan takes either a program file or --model")
    if options.model is None:
        program, operators = read_parsed(options.program, Program.from_json), ""
    else:
        program, operators = trace_model(options, machine)
    program = whole_step(program, options)
    costs = roofline(program, machine)
    memory, fixed = StepMemory(program, costs), program.fixed or FixedMemory()
    budget_bytes = parse_step_budget(options.budget, memory, fixed)
    limits: dict[str, Any] = {
        "tier": options.tier or machine.tiers[0].name,
        "min_swap_bytes": min_swap_bytes,
    }
    if options.effort != 1:
        limits["effort"] = options.effort
    started, note = time.perf_counter(), ""
    try:
        plan = plan_within(options.policy, memory, machine, budget_bytes=budget_bytes, **limits)
    except PlanInfeasible as error:
        if (share := parse_share(options.budget, of=_WHOLE)) is None:
            raise error.but(unit=unit_of(options.budget)) from None
        min_share = error.parts[-1][1] / memory.peak.nbytes
        if error.needed_bytes > machine.device_bytes:
            instead = f"of which '{machine.name}' has {format_bytes(machine.device_bytes)}"
            raise error.but(shares=(100 * share, 100 * min_share), instead=instead) from None
        budget_bytes = error.needed_bytes
        plan = plan_within(options.policy, memory, machine, budget_bytes=budget_bytes, **limits)
        note = min_share_taken(share, min_share, budget_bytes)
    planning_seconds = time.perf_counter() - started
    figures = plan_figures(program, plan, budget_bytes, planning_seconds)
    if program.is_cyclic:
        figures["whole_step"] = step_figures(program, costs, machine, plan)
    if page is not None:
        _write_page(page, program, plan, simulate(program, costs, machine, plan), machine)
    notes = "; ".join(filter(None, (operators, note)))
    text = plan_text(program, plan, machine, figures, all_buffers=options.all_buffers, note=notes)
    print_result(json.dumps(figures, indent=1) if options.json else text)
    return 0


def plan_within(policy: str, memory: StepMemory, machine: Machine, *, budget_bytes: int, **limits: Any) -> Plan:
    """Plan under a budget that counts what `lmswap.enable` counted where the program was captured.

    Raises:
        PlanInfeasible: no plan fits; its parts are those that such a budget counts.
        OptionError, TierError: see `make_plan`.
    """
    from lmswap.planner import KEEP_WHAT_FITS, make_plan

    program, costs, peak_bytes = memory.program, memory.costs, memory.peak.nbytes
    fixed = program.fixed or FixedMemory()

    def plan(step_bytes: int) -> Plan:
        return make_plan(policy, program, costs, machine, budget_bytes=step_bytes, **limits)

    try:
        return plan(budget_bytes - fixed.total_bytes())
    except PlanInfeasible as error:
        needs = [(error.needed_bytes + fixed.total_bytes(), error.needed_bytes, False)]
        if policy in KEEP_WHAT_FITS:  # a plan that moves nothing has a smaller margin, and so may need less
            needs.append((peak_bytes + fixed.total_bytes(is_unmoved=True), peak_bytes, True))
        needed_bytes, needed_step_bytes, is_unmoved = min(needs)
        if needed_bytes <= budget_bytes:
            return plan(budget_bytes - fixed.total_bytes(is_unmoved=is_unmoved))
        refusal = error.but(
            budget_bytes=budget_bytes,
            needed_bytes=needed_bytes,
            parts=(*fixed.parts(is_unmoved=is_unmoved), ("for the step's tensors", needed_step_bytes)),
            counted=fixed.counted,
            uncounted_bytes=fixed.uncounted_bytes,
            gradient_bytes=program.gradient_bytes,
        )
        if is_unmoved:
            peak = memory.peak
            refusal = refusal.but(where=f"op {peak.op} {program.ops[peak.op].title}", live=peak.live)
        raise refusal from None


def _write_page(path: Path, program: Program, plan: Plan, predicted: Timeline, machine: Machine) -> None:
    title = f"{program.name} on {machine.name}: policy {plan.policy}"
    summary = [
        ("peak of the step's tensors", f"{format_bytes(plan.predicted_peak_bytes)} predicted"),
        ("budget for the step's tensors", format_bytes(plan.budget_bytes)),
        ("step", f"{format_seconds(plan.predicted_seconds)} predicted"),
    ]
    decisions = buffer_decisions(program, plan, predicted)
    write_page(path, (predicted,), decisions, title=title, budget_bytes=plan.budget_bytes, summary=summary)


def parse_step_budget(text: str, memory: StepMemory, fixed: FixedMemory) -> int:
    """Parse a budget: bytes, or a share of the step's unplanned peak, plus the fixed memory."""
    share = parse_share(text, of=_WHOLE)
    if share is None:
        return parse_budget(text, also=(SHARE,))
    return fixed.total_bytes() + max(1, int(share * memory.peak.nbytes))


def plan_figures(program: Program, plan: Plan, budget_bytes: int, planning_seconds: float) -> dict[str, Any]:
    """Return what `--json` prints: schema "lmswap.plan/3", in bytes and seconds; peak and budget as in reports."""
    fixed = program.fixed or FixedMemory()
    decisions = buffer_decisions(program, plan)
    nbytes = {kind: sum(row.nbytes for row in decisions if row.decision is kind) for kind in Decision}
    return {
        "schema": "lmswap.plan/3",
        "program": program.name,
        "policy": plan.policy,
        "budget_bytes": budget_bytes,
        "step_budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.predicted_peak_bytes + fixed.before_bytes + fixed.reserve_bytes,
        "step_seconds": plan.predicted_seconds,
        "lower_bound_seconds": plan.certificate.seconds if plan.certificate else 0.0,
        "planning_seconds": planning_seconds,
        "kept_bytes": nbytes[Decision.KEEP],
        "swapped_bytes": nbytes[Decision.SWAP],
        "recomputed_bytes": nbytes[Decision.RECOMPUTE],
        "tier_bytes": plan.tier_bytes,
        "plan": json.loads(plan.to_json()),
    }


def plan_text(
    program: Program,
    plan: Plan,
    machine: Machine,
    figures: dict[str, Any],
    *,
    all_buffers: bool = False,
    note: str = "",
) -> str:
    """Return what is printed without `--json`."""
    table = Table.grid(padding=(0, 2))
    table.add_row("program", f"{program.name}: {len(program.ops)} ops, {len(program.buffers)} buffers")
    table.add_row("machine", machine.name)
    table.add_row("policy", f"{plan.policy}, planned in {format_seconds(figures['planning_seconds'])}")
    table.add_row(
        "peak", f"{format_bytes(figures['peak_bytes'])} of a budget of {format_bytes(figures['budget_bytes'])}"
    )
    table.add_row("budget", _counted_memory(program, plan, figures["budget_bytes"]))
    if note:
        table.add_row("note", note)
    table.add_row("step", f"{format_seconds(plan.predicted_seconds)} (predicted from the machine's rates)")
    table.add_row("bound", f"{format_seconds(figures['lower_bound_seconds'])}: {format_excess(plan.excess)}")
    for row in step_rows(plan, figures["whole_step"]) if "whole_step" in figures else ():
        table.add_row(*row)
    explanation = make_explanation(program, plan, policy=plan.policy, all_buffers=all_buffers)
    return render_text(table, Text(), explanation.tables())


def _counted_memory(program: Program, plan: Plan, budget_bytes: int) -> str:
    """Return what the budget counts."""
    if program.fixed is None:
        return "the step's tensors only: the file does not say what else the device holds"
    fixed = program.fixed
    is_unmoved = plan.budget_bytes == budget_bytes - fixed.total_bytes(is_unmoved=True)
    parts = (*fixed.parts(is_unmoved=is_unmoved), ("for the step's tensors", plan.budget_bytes))
    total = " + ".join(f"{format_bytes(nbytes)} {what}" for what, nbytes in parts if nbytes)
    if program.is_cyclic:
        return f"{total}, with parameters, gradients and optimizer state"
    counted = f": {fixed.counted}" if fixed.counted else ""
    return f"{total}; counted as by lmswap.enable{counted}"


def this_machine(tier: str | None) -> Machine:
    """Return this machine, with ``tier`` or that of its device, measured or remembered."""
    from lmswap.hardware.device import default_device, default_tier
    from lmswap.hardware.measure import describe_machine

    device = default_device()
    return describe_machine(device, tier or default_tier(device.type))


def read_parsed(path: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """Parse the text of a file; errors name the file."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read '{path}': {without_path(error)}") from error
    try:
        return parse(text)
    except LmswapError as error:
        raise type(error)(f"cannot read '{path}': {error}") from error
