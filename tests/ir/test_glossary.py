"""The glossary is the docstring of lmswap.ir; docs/glossary.md is its rendering."""

import re
from pathlib import Path

import lmswap.ir

PAGE = Path(__file__).parents[2] / "docs" / "glossary.md"
HEAD = """# Glossary

Synonyms of the literature are in parentheses. This page is the docstring of `lmswap.ir`, rendered by
`python -m tests.ir.test_glossary`.

| term | meaning |
|---|---|
"""


def entries() -> dict[str, str]:
    assert lmswap.ir.__doc__ is not None
    _, _, listed = lmswap.ir.__doc__.partition("parentheses:\n\n")
    rows = [re.fullmatch(r"(.{14}) (\S.*)", line) for line in listed.splitlines() if line]
    assert None not in rows
    return {row[1].rstrip(): row[2] for row in rows if row}


def page() -> str:
    return HEAD + "".join(f"| {term} | {meaning} |\n" for term, meaning in entries().items())


def test_the_page_is_the_docstring():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.ir.test_glossary"


def test_each_term_is_defined_once_with_its_synonyms_named():
    assert lmswap.ir.__doc__ is not None
    found = entries()
    assert len(found) == len(lmswap.ir.__doc__.partition("parentheses:\n\n")[2].splitlines())
    for synonym in ("offload", "reload", "rematerialization", "evict", "backing store", "live range", "dual variable"):
        assert sum(synonym in meaning for meaning in found.values()) == 1, synonym
        assert synonym not in found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
