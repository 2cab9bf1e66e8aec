"""`lmswap plan`: predicts the cost of a step under a budget, on this machine or another, without running it."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmswap.cli.model import TracedModel, add_model_options, save_program
from lmswap.cli.whole_step import add_step_options, whole_step
from lmswap.errors import LmswapError, OptionError, PlanInfeasible, TierError, without_path
from lmswap.files import read_text
from lmswap.ir.bytesize import format_bytes, parse_budget, parse_bytes
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program
from lmswap.planner import POLICIES
from lmswap.reporting.decisions import buffer_decisions
from lmswap.reporting.output_file import check_can_write
from lmswap.reporting.page import ENDING, write_page
from lmswap.reporting.picture import ENDINGS, write_picture
from lmswap.reporting.text import format_seconds, print_result

if TYPE_CHECKING:
    from lmswap.analyze.memory import StepMemory
    from lmswap.cli import Commands
    from lmswap.cli.fit import Fit, Outcome
    from lmswap.cli.step_plan import StepPlan

_Parsed = TypeVar("_Parsed")


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
        help='as of lmswap.enable: "6GiB", "800 MB", or "40%%" of what the step\'s tensors take unplanned; '
        "several, 24GiB,80GiB, make a table",
    )
    parser.add_argument("--machine", metavar="FILE", help="a machine description; default: measure this machine")
    parser.add_argument(
        "--policy", default="auto", help=f"one of {', '.join(POLICIES)}; default: auto, the fastest that fits"
    )
    parser.add_argument("--tier", choices=("host", "disk", "compressed", "peer"), help="default: the machine's first")
    parser.add_argument("--min-swap", metavar="BYTES", default="1MiB", help="smaller buffers stay; default: 1MiB")
    for moved in ("--ranks", "--network"):  # to benchmarks.distributed, which `run` names for one release
        parser.add_argument(moved, help=argparse.SUPPRESS)
    parser.add_argument("--all-buffers", action="store_true", help="print all buffers, not the ten largest")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the predicted step as a page, too")
    parser.add_argument("--plot", metavar="FILE", help=f"draw it, too: {', '.join(ENDINGS)}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, and print a plan, a table of several, or their figures."""
    from lmswap.cli.plan_text import budgets_text, plan_text

    if options.ranks is not None or options.network is not None:
        command = shlex.join(["python", "-m", "benchmarks.distributed", "predict", *options.words[1:]])
        raise OptionError(f"--ranks and --network have moved out of the package; in a checkout, run: {command}")
    if options.html:
        check_can_write(options.html, ENDING)
    if options.plot:
        check_can_write(options.plot, *ENDINGS)
    min_swap_bytes = parse_bytes(options.min_swap, what="--min-swap")
    machine = read_parsed(options.machine, Machine.from_json) if options.machine else this_machine(options.tier)
    if (options.program is None) == (options.model is None):
        raise OptionError("plan takes either a program file or --model")
    limits: dict[str, Any] = {"tier": options.tier or machine.tiers[0].name, "min_swap_bytes": min_swap_bytes}
    model = TracedModel(options, machine) if options.model else None
    fits = _plan_all(options, machine, model, limits)
    if model and options.save:
        save_program(model.program(fits[0].size), options.save)
    if len(fits) > 1:
        print_result(json.dumps([fit.figures() for fit in fits], indent=1) if options.json else budgets_text(fits))
        return 0
    [fit] = fits
    if isinstance(step := fit.outcome, Exception):
        raise step
    if options.html or options.plot:
        _draw(options, step)
    text = (
        json.dumps(fit.figures(), indent=1) if options.json else plan_text(step, fit, all_buffers=options.all_buffers)
    )
    print_result(text)
    return 0


def _plan_all(
    options: argparse.Namespace, machine: Machine, model: TracedModel | None, limits: dict[str, Any]
) -> list[Fit]:
    """Return what fits each budget; each size is traced once.

    Raises:
        OptionError: an argument that is not valid, or several budgets for one file.
    """
    from lmswap.analyze.cost import roofline
    from lmswap.analyze.memory import StepMemory
    from lmswap.cli.fit import Fit, find_largest
    from lmswap.cli.step_plan import plan_step

    budgets, degree = options.budget.split(","), model.degree if model else 0
    if len(budgets) > 1 and (options.html or options.plot or (options.save and degree)):
        raise OptionError("--html, --plot, and --save with an N in --batch, are for one budget")
    program_of = model.program if model else lambda _: read_parsed(options.program, Program.from_json)

    @cache
    def memory_of(size: int) -> StepMemory:
        program = whole_step(program_of(size), options)
        return StepMemory(program, roofline(program, machine))

    def plan(budget: str, memory: StepMemory) -> Outcome:
        try:
            return plan_step(options.policy, memory, machine, budget, **limits)
        except PlanInfeasible as refusal:
            return refusal.but(note=model.note if model else "")
        except TierError as refusal:
            return refusal

    def tried(budget: str) -> dict[int, Outcome]:
        within = partial(plan, budget)
        return find_largest(memory_of, within, parse_budget(budget), degree) if degree else {1: within(memory_of(1))}

    return [Fit(budget, tried(budget), model, options.micro_batches or 1) for budget in budgets]


def _draw(options: argparse.Namespace, step: StepPlan) -> None:
    """Write the page and the picture of the predicted step."""
    program, plan, predicted = step.program, step.plan, step.predicted()
    title = f"{program.name} on {step.machine.name}: policy {plan.policy}"
    if options.plot:
        write_picture(Path(options.plot), (predicted,), title=title, budget_bytes=step.budget_bytes, peak_bytes={})
    if not options.html:
        return
    summary = [
        ("peak", f"{format_bytes(step.peak_bytes)} predicted"),
        ("budget", format_bytes(step.budget_bytes)),
        ("step", f"{format_seconds(plan.predicted_seconds)} predicted"),
    ]
    decisions = buffer_decisions(program, plan, predicted)
    write_page(
        Path(options.html), (predicted,), decisions, title=title, budget_bytes=step.budget_bytes, summary=summary
    )


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
