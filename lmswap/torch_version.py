"""The versions of torch that lmswap is tested with; pip ensures them, but torch may be upgraded later."""

from __future__ import annotations

import re

import torch

from lmswap.errors import UntestedTorch
from lmswap.session.diagnostics import warn

FIRST, BEFORE = (2, 11), (2, 14)  # as in pyproject.toml
_warned_of: set[str] = set()


def warn_untested() -> None:
    """Warn, once in a process, if torch is older or newer than the tested versions."""
    version = torch.__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_tested = numbers is not None and FIRST <= (int(numbers[1]), int(numbers[2])) < BEFORE
    if is_tested or version in _warned_of:
        return
    _warned_of.add(version)
    tested = f"{_text(FIRST)} to {_text((BEFORE[0], BEFORE[1] - 1))}"
    warn(
        f"torch {version} is not tested with this lmswap, which uses inner parts of torch: it may fail, or plan badly. "
        f"Install one of torch {tested}, or compare some steps with enable(verify=True)",
        UntestedTorch,
    )


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
