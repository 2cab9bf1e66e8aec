"""Memory-constrained training for PyTorch: a byte budget, bitwise identical results, the shortest step that fits.

    model = lmswap.enable(model, budget="6GiB")

The pipeline is the list of packages: capture → analyze → planner → rewrite → runtime → reporting; ``ir`` holds the data
types that they share, and `lmswap.api` joins them. Importing this package imports no torch: the names below load on
first use. If torch is loaded already, MKL is initialized, see `lmswap.hardware.mkl_init`.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmswap import errors as errors
    from lmswap.api import disable as disable
    from lmswap.api import dry_run as dry_run
    from lmswap.api import enable as enable
    from lmswap.api import explain as explain
    from lmswap.api import least_budget as least_budget
    from lmswap.api import program as program
    from lmswap.api import report as report
    from lmswap.api import save_plan as save_plan
    from lmswap.errors import LmswapError as LmswapError
    from lmswap.ir.emulation import EmulatedLink as EmulatedLink
    from lmswap.profiling.context import profile as profile

    __version__: str

__all__ = [
    "EmulatedLink",
    "LmswapError",
    "disable",
    "dry_run",
    "enable",
    "explain",
    "least_budget",
    "profile",
    "program",
    "report",
    "save_plan",
]
_OF_ENABLED = ("disable", "explain", "least_budget", "program", "report", "save_plan")  # what takes an enabled model
_ORIGINS = {  # the others: lmswap.api
    "EmulatedLink": "lmswap.ir.emulation",
    "LmswapError": "lmswap.errors",
    "profile": "lmswap.profiling.context",
}

if "torch" in sys.modules:
    importlib.import_module("lmswap.hardware.mkl_init").initialize_mkl()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lmswap")
    if name == "errors":
        return importlib.import_module("lmswap.errors")
    if name in __all__:
        origin = _ORIGINS.get(name, "lmswap.api")
        if origin not in sys.modules:
            if name in _OF_ENABLED:
                return _before_enable(name)
            _import(origin)
        return getattr(importlib.import_module(origin), name)
    raise AttributeError(f"module 'lmswap' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _before_enable(name: str) -> Callable[..., Any]:
    """Return function ``name`` of `lmswap.api`, which is imported for it only once a model can be enabled."""

    def function(model: object, *args: Any, **kwargs: Any) -> Any:
        if "lmswap.api" in sys.modules:
            return getattr(sys.modules["lmswap.api"], name)(model, *args, **kwargs)
        if name != "disable":
            raise importlib.import_module("lmswap.errors").not_enabled(model)
        return None

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"See `lmswap.api.{name}`."
    return function


def _import(module: str) -> None:
    """Import ``module`` and report the wait; keep the state of `random`, from which rich draws a number meanwhile.

    Raises:
        ImportError: the installed torch lacks a private name that lmswap uses.
    """
    drawn = random.getstate()
    reported = importlib.import_module("lmswap.progress").reported
    collection_paused = importlib.import_module("lmswap.collection_pause").collection_paused
    try:
        with reported("importing what torch.compile needs"), collection_paused():
            importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        if "torch" not in sys.modules:
            raise
        message = importlib.import_module("lmswap.torch_compat.versions").describe_missing_name(error)
        if message is None:
            raise
        raise ImportError(message) from error
    finally:
        random.setstate(drawn)
