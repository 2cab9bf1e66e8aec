"""Adds files outside of docs/ that pages link to, to the site under their own paths.

In the repository a page in docs/ links to ../CHANGELOG.md or ../benchmarks/results/x.svg, as any reader of the files
expects. On the site docs/ is the root, so these links lose their "../", and links from outside into docs/ "docs/".
Pages of the navigation may lie outside, too. The site links to the repository that the checkout was cloned from.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
_TARGET = re.compile(r"\]\(([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Link to where the checkout was cloned from, if that is a web page."""
    command = ["git", "config", "--get", "remote.origin.url"]
    url = urlsplit(subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True).stdout.strip())
    if url.scheme == "https" and url.hostname:  # without a user's name or token
        config.repo_url = f"https://{url.hostname}{url.path.removesuffix('.git')}"
        config.repo_name = "Repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file outside of docs/ that the navigation, a page, or a page added so, links to."""
    linked = [ROOT / name for name in re.findall(r"[\w/]+\.md", str(config.nav))]
    for page in sorted(Path(config.docs_dir).glob("*.md")):
        linked += _linked(page)
    while linked:
        path = linked.pop()
        if not path.is_file() or not path.is_relative_to(ROOT) or path.is_relative_to(config.docs_dir):
            continue
        name = path.relative_to(ROOT).as_posix()
        if files.get_file_from_path(name) is None:
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
            linked += _linked(path) if path.suffix == ".md" else []
    return files


def _linked(page: Path) -> list[Path]:
    return [(page.parent / target).resolve() for target in _TARGET.findall(page.read_text(encoding="utf-8"))]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as they are on the site."""
    if "/" in page.file.src_uri:  # deeper than docs/: beside what it links to, but for pages of docs/
        return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
    return markdown.replace("](../", "](").replace("](docs/", "](")
