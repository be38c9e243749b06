"""The README keeps up: its example is the one that a test runs, its tree names every module, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_embedding_example_is_the_file_that_a_test_runs() -> None:
    assert (ROOT / "examples" / "embed_phase.py").read_text().strip() in README


def test_every_module_is_in_the_tree() -> None:
    tree = README.split("## Where things are")[1]
    named = set(re.findall(r"^ +([\w./]+\.py)\b", tree, re.MULTILINE))
    modules = {path.name for top in ("dagrl", "graphs", "workers", "bench") for path in (ROOT / top).rglob("*.py")}
    assert modules - named - {"__init__.py"} == set()


def test_local_links_exist() -> None:
    links = re.findall(r"\]\(((?!http)[^)#]+)", README)
    assert links and not [link for link in links if not (ROOT / link).exists()]
