"""Adds files outside of docs/ that pages link to, to the site under their own paths.

In the repository a page in docs/ links to ../CHANGELOG.md or ../benchmarks/results/x.svg, as any reader of the files
expects. On the site docs/ is the root, so these links lose their "../", and links from outside into docs/ "docs/".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
_TARGET = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds each file outside of docs/ that a page, or a page added so, links to."""
    pages = sorted(Path(config.docs_dir).glob("*.md"))
    while pages:
        page = pages.pop()
        for target in _TARGET.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            is_outside = path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(config.docs_dir)
            name = path.relative_to(ROOT).as_posix() if is_outside else ""
            if name and files.get_file_from_path(name) is None:
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
                pages += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as they are on the site."""
    if "/" in page.file.src_uri:  # deeper than docs/: beside what it links to
        return markdown
    return markdown.replace("](../", "](").replace("](docs/", "](")
