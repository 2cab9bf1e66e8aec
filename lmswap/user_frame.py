"""Finds the user's code on the stack: all that is not part of torch, of lmswap or of contextlib between them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_LMSWAP = Path(__file__).parent
# contextlib calls the end of a context that lmswap or torch wrote as a generator.
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{_LMSWAP}/", contextlib.__file__)
_DISPATCH = str(_LMSWAP / "dispatch.py")


def is_users(path: str) -> bool:
    """Whether a file is the user's; folders of the user may be called torch or lmswap."""
    return not path.startswith(_NOT_THE_USERS)


def users_frame() -> FrameType:
    """Return the frame in which the user's code calls torch or lmswap; during a call of the model, that of the call.

    Autograd has a thread for each GPU, without any code of the user: there it is the frame in which the main thread
    waits.
    """
    here, main_thread = sys._getframe(1), threading.main_thread().ident or 0
    for stack in (_outwards(here), _outwards(sys._current_frames().get(main_thread))):
        calls = [number for number, frame in enumerate(stack) if frame.f_code.co_filename == _DISPATCH]
        for frame in stack[calls[-1] if calls else 0 :]:
            if is_users(frame.f_code.co_filename):
                return frame
    return here


def _outwards(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def user_line_and_module(names: Mapping[int, str]) -> tuple[str, str]:
    """Return the innermost line of the user's code that runs now, "unet.py:88", and the innermost module's name.

    ``names`` are those of modules, by identity.
    """
    source: str | None = None
    module: str | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (source is None or module is None):
        file, is_method = _describe(frame.f_code)
        if source is None and file:
            source = file if frame.f_lineno is None else f"{file}:{frame.f_lineno}"
        if module is None and is_method:
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module):
                module = names.get(id(owner))  # that of the model itself is ""
        frame = frame.f_back
    return source or "", module or ""


@lru_cache(maxsize=1024)
def _describe(code: CodeType) -> tuple[str, bool]:
    """Return the file's name if it is the user's code, else ""; and whether it may be a method of a module."""
    path, variables = code.co_filename, (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    is_method = "self" in variables and not path.startswith(f"{_LMSWAP}/")
    return path.rsplit("/", 1)[-1] if is_users(path) else "", is_method
