"""The options of a plan for the whole training step: parameters, gradients and optimizer state with activations."""

from __future__ import annotations

import argparse

from lmswap.analyze.training_step import OPTIMIZERS, optimizer_called, training_step
from lmswap.errors import OptionError
from lmswap.ir.program import Program


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
    is_forward = {segment.phase for segment in program.segments} == {"inference"}
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
