"""Finds the user's code on the stack: all that is not part of torch, of lmswap or of contextlib between them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

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
    source, module = "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (source and module):
        path = frame.f_code.co_filename
        if not source and is_users(path):
            source = f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, torch.nn.Module):
            module = names.get(id(owner), "")
        frame = frame.f_back
    return source, module
