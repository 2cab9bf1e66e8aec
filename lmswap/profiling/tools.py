"""Selection of the profiler: from the requested tool and what the machine has, to the tool used and the reason."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from lmswap.errors import OptionError

TOOLS = ("auto", "kineto", "nsys", "nvprof", "lmswap")


@dataclass(frozen=True)
class Host:
    """What the selection depends on: ``gpus`` as (name, compute capability), and torch's CUDA version, if any."""

    gpus: tuple[tuple[str, tuple[int, int]], ...]
    cuda: str | None
    programs: frozenset[str]  # of nsys and nvprof, the installed ones


def find_profilers() -> Host:
    """Return what this machine has."""
    import torch

    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        gpus = tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in devices)
    installed = frozenset(program for program in ("nsys", "nvprof") if shutil.which(program))
    return Host(gpus, torch.version.cuda, installed)


def choose(tool: str, host: Host, known: tuple[str, ...] = TOOLS) -> tuple[str, str]:
    """Return the tool to use for ``tool``, one of ``known``, and a sentence if it is another one, else "".

    "auto" is Kineto with a GPU, since it comes with torch, and otherwise lmswap's own record.

    Raises:
        OptionError: no such tool.
    """
    if tool not in known:
        raise OptionError(f"unknown tool '{tool}': choose one of {', '.join(known)}")
    best = "kineto" if host.gpus else "lmswap"
    if tool == "auto":
        return best, ""
    obstacle = _obstacle(tool, host)
    return (best, f"{tool} cannot work here: {obstacle}; {best} was used instead") if obstacle else (tool, "")


def _obstacle(tool: str, host: Host) -> str:
    if tool in ("kineto", "lmswap"):
        return ""
    if not host.gpus:
        return "torch finds no GPU, and it sees nothing else"
    if tool == "nvprof":
        for name, (major, minor) in host.gpus:
            if major >= 8:
                return f"it refuses GPUs from compute capability 8.0 on, and {name} has {major}.{minor}"
        if host.cuda is not None and int(host.cuda.partition(".")[0]) >= 13:
            return f"it was removed in CUDA 13.0, and this torch is built for CUDA {host.cuda}"
    if tool not in host.programs:
        return f"no program '{tool}' is installed"
    return ""
