"""Versions of torch that lmswap is tested with; pip ensures them, but torch may be upgraded later."""

from __future__ import annotations

import re

import torch

FIRST, BEFORE = (2, 11), (2, 14)  # as in pyproject.toml
_reported: set[str] = set()


def tested_versions() -> str:
    """Return the tested versions for messages: "2.11 to 2.13"."""
    (major, minor), (last, before) = FIRST, BEFORE
    return f"{major}.{minor} to {last}.{before - 1}"


def take_untested_notice() -> str | None:
    """Return, once in a process, a warning if the installed torch is older or newer than the tested versions."""
    version = torch.__version__
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_tested = numbers is not None and FIRST <= (int(numbers[1]), int(numbers[2])) < BEFORE
    if is_tested or version in _reported:
        return None
    _reported.add(version)
    return (
        f"torch {version} is not tested with this lmswap, which uses inner parts of torch: it may fail, or plan badly. "
        f"Install one of torch {tested_versions()}, or compare some steps with enable(verify=True)"
    )


def describe_missing_name(error: ImportError | AttributeError) -> str | None:
    """Return the message for ``error`` if it was raised since the installed torch lacks a name, else None."""
    owner = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", None)
    if not str(owner).startswith("torch.") and (owner != "torch" or isinstance(error, ImportError)):
        return None
    return (
        f"{error}: lmswap uses it, and torch {torch.__version__} does not have it. This lmswap is tested with torch "
        f"{tested_versions()}: install one of these"
    )
