"""Which profiler can work here, and why not another? What the machine has → the tool that is used, and the reason."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from lmswap.errors import OptionError

TOOLS = ("auto", "kineto", "nsys", "nvprof", "lmswap")


@dataclass(frozen=True)
class Host:
    """What decides. ``gpus`` are (name, compute capability); ``cuda`` is the version torch was built for, if any."""

    gpus: tuple[tuple[str, tuple[int, int]], ...]
    cuda: str | None
    programs: frozenset[str]  # of nsys and nvprof, those that are installed


def look() -> Host:
    """What this machine has."""
    import torch

    gpus: tuple[tuple[str, tuple[int, int]], ...] = ()
    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        gpus = tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in devices)
    installed = frozenset(program for program in ("nsys", "nvprof") if shutil.which(program))
    return Host(gpus, torch.version.cuda, installed)


def choose(tool: str, host: Host, known: tuple[str, ...] = TOOLS) -> tuple[str, str]:
    """The tool to use when ``tool``, one of ``known``, is asked for, and a sentence if it is another one, else "".

    "auto" is Kineto with a GPU, for it comes with torch, and else lmswap's own record, which is all there is to see.

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
