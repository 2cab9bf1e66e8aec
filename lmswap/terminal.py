"""Escapes control characters in text for a terminal, which would execute them.

They can set the title, fill the clipboard, hide or reorder lines, and names in files may contain them: all text that
lmswap prints, logs, warns with or raises passes through `escape_controls`.
"""

from __future__ import annotations


def escape_controls(text: str) -> str:
    """Return ``text`` with all but printable characters and line ends escaped, as in a string literal of Python."""
    return "\n".join(line if line.isprintable() else "".join(map(_escape, line)) for line in text.split("\n"))


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
