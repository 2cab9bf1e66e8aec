"""The options of a plan for the whole training step: parameters, gradients and optimizer state with activations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from lmswap.analyze.training_step import OPTIMIZERS, optimizer_called, training_step
from lmswap.errors import OptionError
from lmswap.ir.bytesize import format_bytes
from lmswap.ir.costs import OpCosts
from lmswap.ir.machine import Machine
from lmswap.ir.plan import Plan
from lmswap.ir.program import BufferKind, Program
from lmswap.ir.schedule import schedule

_NAMES = {
    BufferKind.WEIGHT: "parameters",
    BufferKind.SUMMED_GRADIENT: "gradients",
    BufferKind.OPTIMIZER_STATE: "optimizer state",
}


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `whole_step`."""
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="plan the whole step of this optimizer: a budget for parameters, gradients, optimizer state and "
        f"activations together, each of which may be swapped; one of {', '.join(OPTIMIZERS)}",
    )
    parser.add_argument("--micro-batches", type=int, metavar="N", help="of an optimizer's step; default: 1")
    parser.add_argument("--clip-norm", action="store_true", help="gradients are clipped by their norm before updates")


def whole_step(program: Program, options: argparse.Namespace) -> Program:
    """Return ``program``, or that of the whole step: with ``--optimizer``, and of a forward alone.

    Raises:
        OptionError: an unknown optimizer, options that need one, or a program without the gradients of parameters.
    """
    is_forward = all(segment.phase == "inference" for segment in program.segments)
    if options.optimizer is None:
        if options.micro_batches is not None or options.clip_norm:
            raise OptionError("--micro-batches and --clip-norm are of an optimizer's step: give --optimizer, too")
        return training_step(program) if is_forward else program
    if is_forward:
        raise OptionError(f"{program.name} is a forward alone, which updates nothing: leave out --optimizer")
    optimizer = optimizer_called(options.optimizer)
    if not program.gradients:
        raise OptionError(
            f"{program.name} does not say which gradients are those of parameters: capture it again, by --model or "
            "lmswap.program"
        )
    count = 1 if options.micro_batches is None else options.micro_batches
    return training_step(program, optimizer, micro_batches=count, clip_norm=options.clip_norm)


def step_figures(program: Program, costs: OpCosts, machine: Machine, plan: Plan) -> dict[str, Any]:
    """Return what a plan of a whole step says beside others, for ``--json``: bytes in all, bytes over the link a step.

    ``compute_share`` is the FLOP/s of the step, recomputes not counted, over those of the machine.
    """
    buffers = schedule(program, plan.recomputes).program.buffers
    copied_out = (swap for swap in plan.swaps if swap.out_start is not None)
    flops = sum(op.flops for op in program.ops)
    return {
        "bytes": {name: program.bytes_of(kind) for kind, name in _NAMES.items()},
        "in_bytes": sum(buffers[swap.buffer].nbytes for swap in plan.swaps),
        "out_bytes": sum(buffers[swap.buffer].nbytes for swap in copied_out),
        "unlimited_seconds": costs.free_seconds,
        "compute_share": flops / machine.flops_per_second / plan.predicted_seconds if plan.predicted_seconds else 0.0,
    }


def step_rows(plan: Plan, figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) of the rows that describe ``figures`` of `step_figures`."""
    yield "whole step", ", ".join(f"{format_bytes(nbytes)} {name}" for name, nbytes in figures["bytes"].items())
    copies = f"{format_bytes(figures['in_bytes'])} in and {format_bytes(figures['out_bytes'])} out a step"
    for tier, nbytes in plan.tier_bytes.items():
        yield "link", f"{copies}, to {format_bytes(nbytes)} of tier '{tier}'"
    ratio = plan.predicted_seconds / figures["unlimited_seconds"]
    yield "speed", f"{ratio:.3f} x a device without a limit; {figures['compute_share']:.0%} of the machine's FLOP/s"
