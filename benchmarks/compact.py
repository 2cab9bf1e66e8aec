"""Writes results for people and diffs: indented JSON, with each list of numbers on one line."""

from __future__ import annotations

import json
import re
from typing import Any

# Strings have no line breaks in JSON, so that this matches none of them.
_NUMBERS = re.compile(r'\[\n\s*([^][{}"]*?)\n\s*\]')


def to_json(data: Any) -> str:
    """Return ``data`` as text that ends with a line break."""
    text = json.dumps(data, indent=1)
    return _NUMBERS.sub(lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"
