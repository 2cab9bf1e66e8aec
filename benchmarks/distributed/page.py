"""Render the page of stored results: ``python -m benchmarks.distributed.page [FILES]``.

Result files given as arguments replace the stored ones of their recipes first; several of one recipe are joined.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.distributed.results import Results, join
from benchmarks.distributed.tables import describe, make_table, write_table

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "results" / "distributed_cpu"
PAGE = STORED.with_suffix(".md")
RECIPES = ("unet3d", "resnet50", "efficiency", "scale", "allreduce")  # in the order of the page
_BETWEEN = re.compile(r"(?<=<!-- stored results -->\n).*(?=<!-- end of them -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed.page", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="to store first, for example RECIPE.json")
    found = [Results.read(path) for path in parser.parse_args(argv).files]
    for recipe in {results.recipe for results in found}:
        join([results for results in found if results.recipe == recipe]).write(STORED / f"{recipe}.json")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def filled(page: str) -> str:
    """``page`` with the stored tables inserted between its marks."""
    paths = [STORED / f"{recipe}.json" for recipe in RECIPES]
    sections = [_section(Results.read(path)) for path in paths if path.exists()]
    return _BETWEEN.sub(lambda _: "".join(f"\n{section}" for section in [*sections, ""]), page)


def _section(results: Results) -> str:
    table = make_table(results)
    about = [textwrap.fill(text, 120, break_on_hyphens=False) for text in (table.note, describe(results.origin))]
    return f"### {table.title}\n\n{about[0]}\n\n{write_table(table)}\n{about[1]}\n"


if __name__ == "__main__":
    sys.exit(main())
