"""Docstrings, comments and messages use standard English and the terms of the glossary (lmswap.ir)."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

EXPRESSIONS = (
    *("told", "tells?", "telling", "asked", "asks", "asking", "heeds?", "heeded", "reckon", "reckons", "reckoned"),
    *("whoever", "nobody", "somebody", "anew", "mended", "remade", "redo", "redone", "rerun", "reruns", "is had"),
    *("be had", "is to come", "made again", "makes? again", "runs? again", "computed? again", "second runs?"),
    *("comes? back", "came back", "coming back", "brings? back", "brought back", "look on", "looks on", "laid"),
    *("hands? over", "handed over", "handing over", "hands? on", "handed on", "hands? out", "handed out"),
    *("lies? beside", "lies? scattered", "to the bit", "so many times", "at hand"),
    *("whatever the plan", "gone of", "is there for good", "goes up in", "otherwise than", "what there is"),
    *("fates?", "wish(?:es)?", "hopeless", "promised", "lessons?", "say of"),
)
HOUSE = re.compile(rf"\b(?:{'|'.join(EXPRESSIONS)})\b".replace(" ", r"\s+"), re.IGNORECASE)
# Folder and its patterns; packages below it are checked one by one, tests and benchmarks as a whole.
SOURCES = {
    "lmswap": ("*.py", "*.pyi"),
    "csrc": ("*.h", "*.cpp"),
    "tools": ("*.py", "*.h", "*.cpp"),
    "tests": ("*.py", "*.h", "*.cpp"),
    "benchmarks": ("*.py",),
}
MAX_HITS = {"tests": 2, "benchmarks": 2}  # none elsewhere; may only be lowered
# Words of identifiers: max_ and min_, swap, action, recompute, report, request and overlap are the standard ones.
HOUSE_NAME = re.compile(
    r"_*(?:most|least)_.*|(?:.*_)?(?<!round_)(?:fates?|trips?|redo|reruns?|remade|wish(?:es)?|hopeless|promised|heeds?|told|"
    r"tells?|asks?|asked|hands|nobody|whoever|beside)(?:_.*)?"
)
NAMED = ("lmswap", "csrc", "tools")
PUBLIC_NAMES = {"least_budget", "reruns", "rerun", "not_beside_plain"}
# Distinct names; none elsewhere; may only be lowered.
MAX_NAMES = {"lmswap": 1, "lmswap/session": 1, "csrc/planner": 1, "csrc/src": 1, "tools/emulated_gpu": 4}
QUESTION = re.compile(r"(?:who|whom|whose|what|which|when|where|why|how|does|do|is|are|can|may|shall|must)\b", re.I)


def texts_of(path: Path) -> list[tuple[int, str]]:
    """(line, text) of the comments of a file, and of the string literals of a Python one, docstrings included.

    Names in backquotes, fields of f-strings, and literals of one word, as keys are, are no language.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".h", ".cpp"):
        found = re.finditer(r"//[^\n]*(?:\n\s*//[^\n]*)*|/\*.*?\*/", source, re.S)
        return [(source.count("\n", 0, each.start()) + 1, each[0].replace("//", " ")) for each in found]
    wanted = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    texts: list[tuple[int, str]] = []
    after_comment = -1  # a comment in the next line continues the sentence
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in wanted:
            if (
                token.type == tokenize.COMMENT
                and token.start[0] == after_comment + 1
                and not token.line[: token.start[1]].strip()
            ):
                texts[-1] = texts[-1][0], texts[-1][1] + " " + token.string.lstrip("#")
            else:
                texts.append((token.start[0], token.string if re.search(r"\s", token.string) else ""))
            after_comment = token.start[0] if token.type == tokenize.COMMENT else -1
    return [(line, re.sub(r"``[^`]*``|`[^`]*`|\{[^{}]*\}", " ", text)) for line, text in texts]


def packages() -> dict[str, list[Path]]:
    """Sources by package: the folders right below those of `SOURCES`, which themselves stand for the files in them."""
    found: dict[str, list[Path]] = {}
    for top, patterns in SOURCES.items():
        for pattern in patterns:
            for path in sorted((ROOT / top).rglob(pattern)):
                parts = path.relative_to(ROOT).parts
                depth = 1 if top in MAX_HITS else 2
                found.setdefault("/".join(parts[:-1][:depth]), []).append(path)
    return found


def names_of_tests(path: Path) -> list[tuple[int, str]]:
    """(line, words) of the names of the tests in a file of Python or GoogleTest."""
    if path.parts[len(ROOT.parts)] != "tests":
        return []
    source = path.read_text(encoding="utf-8")
    found = re.finditer(r"^def test_(\w+)\(|^TEST(?:_[FP])?\(\s*\w+,\s*(\w+)\)", source, re.M)
    return [(source.count("\n", 0, each.start()) + 1, (each[1] or each[2]).replace("_", " ")) for each in found]


def identifiers_of(path: Path) -> set[str]:
    """The identifiers in a file, in snake case."""
    source = path.read_text(encoding="utf-8")
    if path.suffix in (".h", ".cpp"):
        names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r'//[^\n]*|/\*.*?\*/|"[^"\n]*"', " ", source, flags=re.S)))
    else:
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() for name in names}


PACKAGES = packages()


def house_expressions(texts: list[str]) -> Counter[str]:
    """House expressions with their counts."""
    return Counter(re.sub(r"\s+", " ", each[0].lower()) for text in texts for each in HOUSE.finditer(text))


def is_question(docstring: str) -> bool:
    return docstring.split("\n\n", maxsplit=1)[0].rstrip().endswith("?") or bool(QUESTION.match(docstring.lstrip()))


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_use_the_terms_of_the_glossary(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {each[0]}"
        for path in PACKAGES[package]
        if path != Path(__file__)
        for line, text in texts_of(path) + names_of_tests(path)
        for each in HOUSE.finditer(text)
    ]
    assert len(found) <= MAX_HITS.get(package, 0), "\n".join(found)


@pytest.mark.parametrize("package", [package for package in sorted(PACKAGES) if package.startswith(NAMED)])
def test_names_use_the_terms_of_the_glossary(package):
    names = set[str]().union(*map(identifiers_of, PACKAGES[package])) - PUBLIC_NAMES
    found = sorted(name for name in names if HOUSE_NAME.fullmatch(name))
    assert len(found) <= MAX_NAMES.get(package, 0), found


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_module_docstrings_are_statements(package):
    modules = [path for path in PACKAGES[package] if path.suffix in (".py", ".pyi")]
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in modules}
    assert [path for path, text in docstrings.items() if (is_question(text) if text else package != "tests")] == []


def test_house_expressions_are_found_across_lines_and_in_messages(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""It is made\nagain."""\nx = f"{rerun}, `redo`: nobody", "told"  # x\n# to the\n# bit\n', encoding="utf-8"
    )
    texts = [text for _, text in texts_of(path)]
    assert house_expressions(texts) == {"made again": 1, "nobody": 1, "to the bit": 1}
    path = tmp_path / "header.h"
    path.write_text("int x;  // told of\n// a second\n// run\n", encoding="utf-8")
    assert house_expressions([text for _, text in texts_of(path)]) == {"told": 1, "second run": 1}


@pytest.mark.parametrize("docstring", ["Which op runs?", "Where is it kept\nand why?\n\nMore.", "What is planned."])
def test_questions_are_found(docstring):
    assert is_question(docstring)


def test_statements_are_no_questions():
    assert not is_question("Whether it fits: a statement.") and not is_question("Island.\n\nWhy? Because.")


def test_house_names_are_found_in_code_only(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('"""least_x"""\nmost_bytes = kMax = is_fate = round_trips = 1  # a_trip\n', encoding="utf-8")
    assert [*filter(HOUSE_NAME.fullmatch, sorted(identifiers_of(path)))] == ["is_fate", "most_bytes"]
    path = tmp_path / "header.h"
    path.write_text('int kMostItems = redo;  // told\nconst char* text = "asked";\n', encoding="utf-8")
    assert [*filter(HOUSE_NAME.fullmatch, sorted(identifiers_of(path)))] == ["redo"]


def test_names_of_tests_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    python, cpp = tmp_path / "tests" / "test_a.py", tmp_path / "tests" / "a_test.cpp"
    python.write_text("\ndef test_what_is_told(x):\n    pass\n\ndef helper():\n    pass\n", encoding="utf-8")
    cpp.write_text("TEST(Suite, is_told) {}\nTEST_P(Suite,\n       nobody_waits) {}\n", encoding="utf-8")
    assert names_of_tests(python) == [(2, "what is told")]
    assert names_of_tests(cpp) == [(1, "is told"), (2, "nobody waits")]
