"""The options of a model that is planned without its memory: what makes it, and the shapes of its inputs."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmswap.errors import OptionError, without_path
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program

if TYPE_CHECKING:
    import torch
    from torch import nn

_BATCH = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_ON_DISK = ("disk", "compressed")  # the tiers of a CPU
_CPU_OPERATORS = "traced with the operators of a CPU, as torch can use no GPU here; a GPU's fuse more"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `trace_model`."""
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="plan a step of the model that this function or class returns, imported from the current "
        "directory as by python -m and called without arguments; its tensors are never allocated",
    )
    parser.add_argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help='the inputs of --model: "2x4096", "1x4x192x192x192:bfloat16"; default dtype: int64 if the model begins '
        "with an embedding, else that of its first parameter",
    )
    parser.add_argument(
        "--forward-only", action="store_true", help="plan the forward of --model alone, in eval mode without gradients"
    )
    parser.add_argument("--save", metavar="FILE", help="write the program of --model, to plan it again")


def trace_model(options: argparse.Namespace, machine: Machine) -> tuple[Program, str]:
    """Return the program of ``--model``, and a note on its operators, or "".

    Raises:
        OptionError: the model cannot be imported, a shape cannot be read, or the program cannot be written.
        CaptureError: the model cannot be traced.
    """
    if not options.batch:
        raise OptionError("--model needs the shapes of its inputs: --batch 2x4096")
    import torch

    from lmswap.capture.dry_run import capture_step

    inputs = [_parse_input(text) for text in options.batch]
    is_of_cpu = machine.tiers[0].name in _ON_DISK
    device = torch.device("cpu" if is_of_cpu or not torch.cuda.is_available() else "cuda")
    program = capture_step(
        _import_maker(options.model),
        lambda model: [_without_values(model, device, *given) for given in inputs],
        device,
        forward_only=options.forward_only,
    )
    if options.save:
        try:
            Path(options.save).write_text(program.to_json(), encoding="utf-8")
        except (OSError, ValueError) as error:  # a path with NUL is a ValueError
            raise OptionError(f"cannot write '{options.save}': {without_path(error)}") from error
    return program, "" if is_of_cpu or device.type == "cuda" else _CPU_OPERATORS


def _import_maker(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise OptionError(f"--model {name}: name what makes the model after a colon, as in train:make_model")
    sys.path.insert(0, str(Path.cwd()))  # and there it stays: the function may import more
    try:
        made: Any = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
    except Exception as error:  # of the user's module
        raise OptionError(f"--model {name} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise OptionError(f"--model {name} is no function or class, but {type(made).__name__}")
    maker: Callable[[], Any] = made
    return maker


def _parse_input(text: str) -> tuple[tuple[int, ...], str]:
    import torch

    found = _BATCH.fullmatch(text)
    dtype = (found and found[2]) or ""
    if found is None or (dtype and not isinstance(getattr(torch, dtype, None), torch.dtype)):
        raise OptionError(f"cannot read --batch {text}: give sizes, and a dtype of torch if needed, as in 2x4096:int64")
    return tuple(map(int, found[1].split("x"))), dtype


def _without_values(model: nn.Module, device: torch.device, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    import torch
    from torch import nn

    first = next((module for module in model.modules() if [*module.parameters(recurse=False)]), None)
    if dtype:
        kind: torch.dtype = getattr(torch, dtype)
    elif first is None or isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        kind = torch.int64
    else:
        kind = next(first.parameters()).dtype
    return torch.empty(shape, dtype=kind, device=device)
