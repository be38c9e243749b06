"""The README and the documentation's pages keep up with the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "dagrl").rglob("*.py"))]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def test_the_embedding_example_is_the_file_that_a_test_runs() -> None:
    section = README.split("## Embed it")[1].split("\n## ")[0]
    excerpts = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    example = (ROOT / "examples" / "embed_phase.py").read_text()
    assert excerpts and all(excerpt in example for excerpt in excerpts)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_every_file_says_what_it_is_for() -> None:
    """The documentation's file map is made of these lines."""
    assert FILES and [file for file in FILES if not re.match(r'r?"""\S', (ROOT / file).read_text())] == []


@pytest.mark.parametrize("page", PAGES)
def test_local_links_exist(page: str) -> None:
    links = {((ROOT / page).parent / link).resolve() for link in LINK.findall((ROOT / page).read_text())}
    assert [str(link) for link in links if not link.exists()] == []


def test_the_generated_reference_is_current() -> None:
    """`make reference` writes it."""
    generated = runpy.run_path(str(ROOT / "docs" / "reference.py"))["pages"]()
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert committed == generated


def test_there_are_at_most_330_keys() -> None:
    """`python docs/keys.py` shows which ones no shipped file sets."""
    assert len(runpy.run_path(str(ROOT / "docs" / "reference.py"))["configuration_keys"]()) <= 330
