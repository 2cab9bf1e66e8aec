"""Which frames of a traceback tell the user anything? Not those of torch's compiler and of lmswap between their own."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from lmswap.errors import LmswapError, PlanInvalid
from lmswap.userline import is_users

_LMSWAP = f"{Path(__file__).parent}/"
_TORCH = Path(torch.__file__).parent
_COMPILER = (f"{_TORCH}/_dynamo/", f"{_TORCH}/_functorch/", f"{_TORCH}/_inductor/", f"{_TORCH}/_compile.py")
_GENERATED = "<eval_with_key>"  # the code of fx's graphs


def shortened(error: Exception) -> Exception:
    """``error``, of a model's code, of an op of its graphs or a refusal, without frames that only run the model.

    One that lmswap or torch's compiler has raised by a mistake of its own keeps all.
    """
    entries = _entries(error.__traceback__)
    raised_in = entries[-1].tb_frame.f_code.co_filename if entries else ""
    is_refusal = isinstance(error, LmswapError) and not isinstance(error, PlanInvalid)
    is_own = _runs_models(raised_in) and not raised_in.startswith(_GENERATED)
    if is_own and not is_refusal:
        return error
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if not _runs_models(entry.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(kept)


def _entries(entry: TracebackType | None) -> list[TracebackType]:
    found = []
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found


def _runs_models(path: str) -> bool:
    return path.startswith((*_COMPILER, _GENERATED)) or (path.startswith(_LMSWAP) and not is_users(path))
