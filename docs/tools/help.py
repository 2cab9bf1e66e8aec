"""Shows the help of a command on the site, in place of a line "Options: `lmswap COMMAND --help`."."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import Any

from lmswap.cli import entry

OPTIONS = re.compile(r"^Options: `lmswap ((?:\w+ )?)--help`\.$", re.MULTILINE)
_COLUMNS = "80"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each such line by a block of what the command prints."""
    return OPTIONS.sub(lambda found: f"```text\n{_help(found[1].split())}```", markdown)


def _help(words: list[str]) -> str:
    os.environ["COLUMNS"] = _COLUMNS  # as argparse reads it
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        entry.main([*words, "--help"])
    return printed.getvalue()
