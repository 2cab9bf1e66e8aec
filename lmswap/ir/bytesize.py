"""Byte counts as text: parsing budgets and shares of memory that a user gives, and formatting counts."""

from __future__ import annotations

import math
import re

from lmswap.errors import OptionError, PlanInfeasible

# Alternatives to a byte count, as errors name them.
AUTO, SHARE = '"auto"', 'a share, "50%"'

MAX_BYTES = 2**60  # sums of a few of them fit in the engine's 64 bits
_MIN_BYTES = 2**20  # of a budget without a unit: a smaller number was meant in another unit
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(text: float | str, *, what: str = "budget", also: tuple[str, ...] = ()) -> int:
    """Reads a positive byte count: a whole number, or a string such as "6GiB", "1.5 GB" or "300 MiB".

    Decimal units are powers of 1000, binary units (KiB, MiB, GiB, TiB) powers of 1024. Errors name
    ``what``, and the alternatives in ``also``, `AUTO` or `SHARE`.

    Raises:
        OptionError: not a number with a known unit, not positive, or more than `MAX_BYTES`.
    """
    is_whole = isinstance(text, int) or (isinstance(text, float) and text.is_integer())
    if isinstance(text, bool) or not (is_whole or isinstance(text, str)):
        raise OptionError(f"{what} must be a whole number of bytes or a string such as {_words(also)}, not {text!r}")
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        if match is None or match[2].lower() not in _UNITS:
            instead = _with_whole_unit(match) or f"an int, or a number with a unit, {_words(also)}"
            raise OptionError(f"{what} {text!r} is not a byte count; write {instead}")
        count = float(match[1]) * _UNITS[match[2].lower()]
    else:
        count = text
    if abs(count) > MAX_BYTES:  # without the number, which may have thousands of digits
        raise OptionError(f"{what} is beyond {format_bytes(MAX_BYTES)}, more than any machine has; check its unit")
    if 0 < count < 1:
        share = f'; for a share of the step write "{100 * count:g}%"' if SHARE in also else ""
        raise OptionError(f"{what} {text!r} is less than a byte{share}")
    if (nbytes := int(count)) <= 0:
        raise OptionError(f"{what} must be more than 0 bytes, got {text!r}")
    return nbytes


def unit_of(given: float | str) -> tuple[str, int]:
    """The unit that a byte count was given in, as it was written, and its bytes; MiB where it has none."""
    name = re.sub(r"[^a-zA-Z]", "", given) if isinstance(given, str) else ""
    scale = _UNITS.get(name.lower(), 1)
    return (name, scale) if scale > 1 else ("MiB", 2**20)


def parse_budget(given: float | str, *, what: str = "budget", also: tuple[str, ...] = ()) -> int:
    """Reads a byte count as `parse_bytes` does, and rejects numbers that lack their unit.

    Raises:
        OptionError: as `parse_bytes`, or fewer bytes than any step takes and no unit.
    """
    nbytes = parse_bytes(given, what=what, also=also)
    has_unit = isinstance(given, str) and given.strip()[-1].isalpha()
    if nbytes < _MIN_BYTES and not has_unit:
        meant = f'"{nbytes}GiB"' + (f' or "{nbytes}%"' if SHARE in also else "")
        raise OptionError(
            f"{what} {given!r} is {format_bytes(nbytes)}, less than any step takes; say the unit, as in {meant}"
        )
    return nbytes


def parse_share(text: str, *, of: str) -> float | None:
    """Reads a share such as "40%"; None if ``text`` does not end in "%". Errors name ``of``, the whole.

    Raises:
        OptionError: not a number above 0 and up to 100.
    """
    if not text.strip().endswith("%"):
        return None
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise OptionError(
            f"budget {text!r} is not a share of {of}; write a number above 0, such as 40%, and up to 100%, which has "
            "room for all of it"
        )
    return share


def min_share_taken(share: float, min_share: float, refusal: PlanInfeasible) -> str:
    """Writes that instead of a budget of ``share`` the least that works is taken, and what ``refusal`` says of it."""
    largest = f", {format_bytes(refusal.live[0][1])} of it by {refusal.live[0][0]}" if refusal.live else ""
    return (
        f"budget '{100 * share:g}%' is too small for this step: the least that works, "
        f"{math.ceil(1000 * min_share) / 10:g}%, is taken, {format_bytes(refusal.needed_bytes)}; the most is needed at "
        f"{refusal.where}{largest}"
    )


def format_bytes(nbytes: float) -> str:
    """Writes a byte count with a binary unit and three to four digits: 1536 -> "1.50 KiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def _words(also: tuple[str, ...]) -> str:
    return ", or ".join(('"6GiB"', *also))


def _with_whole_unit(match: re.Match[str] | None) -> str:
    """The full units that "6G" or "6Gi" may mean; "" for other text."""
    if match is None or not re.fullmatch("[kmgt]i?", match[2].lower()):
        return ""
    number, letter = match[1], match[2][0].upper()
    return f'"{number}{letter}B" or "{number}{letter}iB"'
