"""Hooks of the documentation site: a page may link to any file of the repository, and the site has a copy of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the linked files from outside `docs/`."""
    for page in files.documentation_pages():
        for target in outside_links(Path(page.abs_src_path or ""), page.content_string):
            uri = site_path(target)
            if target.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave `docs/` at the site's copies."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    up = "../" * page.file.src_uri.count("/")

    def copied(link: re.Match[str]) -> str:
        target = (Path(source).parent / link[1]).resolve()
        return link[0] if target.is_relative_to(ROOT / "docs") else f"]({up}{site_path(target)})"

    return LINK.sub(copied, markdown)


def outside_links(page: Path, markdown: str) -> Iterator[Path]:
    """Yields the files outside `docs/` that a page links to."""
    for link in LINK.finditer(markdown):
        target = (page.parent / link[1]).resolve()
        if not target.is_relative_to(ROOT / "docs"):
            yield target


def site_path(target: Path) -> str:
    """Where the site has a file of the repository; Markdown is shown as text, so that its own links stay unread."""
    path = f"files/{target.relative_to(ROOT)}"
    return f"{path}.txt" if path.endswith(".md") else path
