"""The pages are short and plain, and the modules and files that they name exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import lmswap

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/*.md"))
MAX_WORDS = 14_000  # of docs/, as `wc -w` counts
MAX_WORDS_IN_A_SENTENCE = 35

MODULE = re.compile(r"\b(?:lmswap|benchmarks|tests)(?:\.[A-Za-z_]\w*)+\b(?![\w.]*/\d)")  # a schema ends in /1
# Keys of metrics begin with lmswap/ too.
FILE = re.compile(r"(?<![\w/.-])(?:(?:csrc|tests|tools|docs|benchmarks|examples)/[\w./-]*\w|lmswap/[\w/]+\.\w+)")


def sentences(text: str) -> list[str]:
    """The sentences of paragraphs and lists; neither code nor tables nor headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\||#|:::|    ).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [sentence for block in blocks for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", " ".join(block.split()))]


def num_words(sentence: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def is_there(name: str) -> bool:
    """Whether a dotted name is a module of the repository, or is defined in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        folder = ROOT.joinpath(*parts[:count])
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if path.is_file():
            break
    else:
        return False
    if count == len(parts):
        return True
    if count == 1 and parts[0] == "lmswap":  # its names load on first use
        return hasattr(lmswap, parts[1])
    return bool(re.search(rf"\b{parts[count]}\b", path.read_text(encoding="utf-8")))


def test_the_page_of_functions_lists_the_public_names_with_the_files_that_define_them():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[`(\w+)`\]\(\.\./([\w/]+)\.py\): .+\.$", page, re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(lmswap.__all__)
    for name, path in listed:
        defined = getattr(importlib.import_module(path.replace("/", ".")), name)
        assert inspect.getsourcefile(inspect.unwrap(defined)) == f"{ROOT / path}.py"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_sentence_is_long(page):
    found = sentences(page.read_text(encoding="utf-8"))
    assert not [sentence for sentence in found if num_words(sentence) > MAX_WORDS_IN_A_SENTENCE]


def test_the_pages_are_short_in_all():
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES) <= MAX_WORDS


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_modules_and_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    files = {found for found in FILE.findall(text) if "NAME" not in found}
    assert not {found for found in files if not (ROOT / found).exists() and not [*ROOT.glob(f"{found}*")]}
    assert not {found for found in MODULE.findall(text) if not is_there(found)}
