"""The README and docs/architecture.md keep up with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


def test_the_embedding_example_is_the_file_that_a_test_runs() -> None:
    section = README.split("## Embed it")[1].split("\n## ")[0]
    excerpts = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    example = (ROOT / "examples" / "embed_phase.py").read_text()
    assert excerpts and all(excerpt in example for excerpt in excerpts)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_file_map_names_every_module_and_no_other() -> None:
    """A room is a heading, such as "### `dagrl/refit/plan`"; its files are the rows of the table below it."""
    named = set()
    for section in re.split(r"^### ", ARCHITECTURE, flags=re.MULTILINE)[1:]:
        room = section[1 : section.index("`", 1)]
        named |= {f"{room}/{file}" for file in re.findall(r"^\| `([\w./]+\.py)` \|", section, re.MULTILINE)}
    files = {
        str(path.relative_to(ROOT))
        for top in ("dagrl", "graphs", "workers", "bench")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert (sorted(files - named), sorted(named - files)) == ([], [])


@pytest.mark.parametrize("page", PAGES)
def test_local_links_exist(page: str) -> None:
    generated = {ROOT / "docs" / "reference" / name for name in ("configuration.md", "nemo-rl.md")}
    links = {((ROOT / page).parent / link).resolve() for link in LINK.findall((ROOT / page).read_text())}
    assert [str(link) for link in links - generated if not link.exists()] == []
