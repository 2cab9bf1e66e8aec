"""How byte counts are written: reading a budget from a user, and printing a count for a user."""

from __future__ import annotations

import math
import re

from lmswap.errors import OptionError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(text: float | str, *, what: str = "budget") -> int:
    """Reads a positive byte count: a whole number, or a string such as "6GiB", "1.5 GB" or "300 MiB".

    Decimal units are powers of 1000, binary units (KiB, MiB, GiB, TiB) powers of 1024.

    Raises:
        OptionError: not a number with a known unit, or not positive.
    """
    is_whole = isinstance(text, int) or (isinstance(text, float) and text.is_integer())
    if isinstance(text, bool) or not (is_whole or isinstance(text, str)):
        raise OptionError(f'{what} must be a whole number of bytes or a string such as "6GiB", not {text!r}')
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            raise OptionError(f'{what} {text!r} is not a byte count; write an int, or a number with a unit, "6GiB"')
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    else:
        nbytes = int(text)
    if nbytes <= 0:
        raise OptionError(f"{what} must be more than 0 bytes, got {text!r}")
    return nbytes


def parse_share(text: str, *, of: str) -> float | None:
    """Reads a share such as "40%"; None if ``text`` is none, but maybe a byte count. ``of`` is said in the error.

    Raises:
        OptionError: not a number above 0.
    """
    if not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise OptionError(f"budget {text!r} is not a share of {of}; write a number above 0, such as 40%")
    return share


def format_bytes(nbytes: float) -> str:
    """Writes a byte count with a binary unit and three to four digits: 1536 -> "1.50 KiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"
