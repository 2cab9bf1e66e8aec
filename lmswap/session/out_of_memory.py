"""Advice for code beside a model that copies or converts the whole of it, for which the device has no memory.

torch's error has figures of the device alone, and does not know of the weights that are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from lmswap.errors import NotManaged
from lmswap.ir.bytesize import format_bytes
from lmswap.session.diagnostics import warn
from lmswap.session.session import Session
from lmswap.torch_compat.caching_allocator import observe_out_of_memory


@cache
def explain_out_of_memory(sessions: Callable[[], Iterable[Session]]) -> None:
    """Warn, from now on, before torch's error if one of ``sessions`` has weights in host memory. Idempotent.

    They are those of models that do not run: within calls such errors are expected, and handled.
    """

    def explain(device: int, *_: object) -> None:
        for session in sessions():
            if session.device.index == device and session.engine.host_copies:
                nbytes = session.engine.host_copies.nbytes
                what = f"the {format_bytes(nbytes)} of {session.name}'s weights in host memory"
                warn(
                    f"{session.device} is full, and has no room for {what}: copy, convert or average the whole model "
                    "(deepcopy, AveragedModel, half) before lmswap.enable, or after model.cpu()",
                    NotManaged,
                )

    observe_out_of_memory(explain)
