"""The options of a model that is planned without its memory: what makes it, and the shapes of its inputs."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmswap.errors import OptionError, without_path
from lmswap.ir.fixed_memory import FixedMemory
from lmswap.ir.machine import Machine
from lmswap.ir.program import Program

if TYPE_CHECKING:
    import torch
    from torch import nn

_BATCH = re.compile(r"((?:\d+|(?:[1-9]\d*)?N)(?:x(?:\d+|(?:[1-9]\d*)?N))*)(?::(\w+))?")
_ON_DISK = ("disk", "compressed")  # the tiers of a CPU
_UNCOUNTED = (
    "planned without margin, batch, traces and kernels, which lmswap.enable counts: there a budget has to be larger"
)
_CPU_OPERATORS = "traced with the operators of a CPU, as torch can use no GPU here; a GPU's fuse more"


class _Multiple(int):
    """The factor of N in a size of an input."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `TracedModel`, and ``--save``."""
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
        "with an embedding, else that of its first parameter; N in a shape, as in Nx4096 or 2x256N, is the largest "
        "number that fits the budget",
    )
    parser.add_argument(
        "--forward-only", action="store_true", help="plan the forward of --model alone, in eval mode without gradients"
    )
    parser.add_argument("--save", metavar="FILE", help="write the program of --model, to plan it again")


class TracedModel:
    """The model of ``--model``, traced for each size of N in its inputs that is wanted, once.

    Raises:
        OptionError: the model cannot be imported, or a shape cannot be read.
    """

    def __init__(self, options: argparse.Namespace, machine: Machine) -> None:
        import torch

        if not options.batch:
            raise OptionError("--model needs the shapes of its inputs: --batch 2x4096")
        self._inputs = [_parse_input(text) for text in options.batch]
        self._maker, self._forward_only = _import_maker(options.model), options.forward_only
        self._is_of_cpu = machine.tiers[0].name in _ON_DISK
        self._device = torch.device("cpu" if self._is_of_cpu or not torch.cuda.is_available() else "cuda")
        has_operators = self._is_of_cpu or self._device.type == "cuda"
        self.note = _UNCOUNTED if has_operators else f"{_UNCOUNTED}; and {_CPU_OPERATORS}"
        self._programs: dict[int, Program] = {}

    @property
    def degree(self) -> int:
        """The power of N that inputs grow with; 0 where no shape has one."""
        return max(sum(isinstance(part, _Multiple) for part in sizes) for sizes, _ in self._inputs)

    def program(self, size: int) -> Program:
        """Return the program with inputs in which N is ``size``.

        Raises:
            CaptureError: the model cannot be traced.
        """
        from lmswap.capture.dry_run import capture_step

        if size not in self._programs:
            shapes = [(_shape(sizes, size), dtype) for sizes, dtype in self._inputs]
            program = capture_step(
                self._maker,
                lambda model: [_without_values(model, self._device, *given) for given in shapes],
                self._device,
                forward_only=self._forward_only,
            )
            if self._is_of_cpu:  # whose budget is one of growth
                parameter_bytes = program.fixed_memory.parameter_bytes
                program = replace(program, fixed=FixedMemory(parameter_bytes=parameter_bytes, device_type="cpu"))
            self._programs[size] = program
        return self._programs[size]

    def batch(self, size: int) -> str:
        """Return the shapes of the inputs in which N is ``size``, "2x4096"."""
        return " ".join("x".join(map(str, _shape(sizes, size))) for sizes, _ in self._inputs)

    def num_samples(self, size: int) -> int:
        """Return the first size of the first input in which N is ``size``."""
        return _shape(self._inputs[0][0], size)[0]


def save_program(program: Program, path: str) -> None:
    """Write ``program`` to ``path``.

    Raises:
        OptionError: it cannot be written.
    """
    try:
        Path(path).write_text(program.to_json(), encoding="utf-8")
    except (OSError, ValueError) as error:  # a path with NUL is a ValueError
        raise OptionError(f"cannot write '{path}': {without_path(error)}") from error


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


def _parse_input(text: str) -> tuple[tuple[int | _Multiple, ...], str]:
    import torch

    found = _BATCH.fullmatch(text)
    dtype = (found and found[2]) or ""
    if found is None or (dtype and not isinstance(getattr(torch, dtype, None), torch.dtype)):
        raise OptionError(
            f"cannot read --batch {text}: give sizes, and a dtype of torch if needed, as in 2x4096:int64; N is the "
            "largest number that fits the budget, as in Nx4096 or 2x256N"
        )
    parts = found[1].split("x")
    return tuple(_Multiple(part.removesuffix("N") or 1) if part.endswith("N") else int(part) for part in parts), dtype


def _shape(sizes: Sequence[int | _Multiple], size: int) -> tuple[int, ...]:
    return tuple(part * size if isinstance(part, _Multiple) else part for part in sizes)


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
