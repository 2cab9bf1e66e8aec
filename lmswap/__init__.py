"""lmswap: trains PyTorch models under a byte budget by swapping tensors; the same bits, at the least time.

    model = lmswap.enable(model, budget="6GiB")

The pipeline is the folder list: capture → analyze → plan → rewrite → execute → reporting; ``ir`` is all they share and
`lmswap.api` joins them. Importing this package imports no torch: the names below load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmswap.api import disable as disable
    from lmswap.api import enable as enable
    from lmswap.api import explain as explain
    from lmswap.api import least_budget as least_budget
    from lmswap.api import program as program
    from lmswap.api import report as report
    from lmswap.api import save_plan as save_plan
    from lmswap.ir.emulation import EmulatedLink as EmulatedLink
    from lmswap.profiling.context import profile as profile

    __version__: str

__all__ = ["EmulatedLink", "disable", "enable", "explain", "least_budget", "profile", "program", "report", "save_plan"]
_ORIGINS = {"EmulatedLink": "lmswap.ir.emulation", "profile": "lmswap.profiling.context"}  # the others: lmswap.api


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lmswap")
    if name in __all__:
        return getattr(importlib.import_module(_ORIGINS.get(name, "lmswap.api")), name)
    raise AttributeError(f"module 'lmswap' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
