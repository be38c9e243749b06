"""Every public name resolves, and the embedding example needs nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import dagrl
from dagrl import errors

ROOT = Path(__file__).parents[2]
TREE = ast.parse((ROOT / "dagrl" / "__init__.py").read_text())


def test_every_public_name_is_what_type_checkers_see() -> None:
    """The names under TYPE_CHECKING, `__all__` and the lazy lookup agree."""
    seen = {
        (alias.name, node.module)
        for branch in TREE.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for name, _ in seen} == set(dagrl.__all__) - {"__version__"}
    for name, module in seen:
        assert module is not None
        assert getattr(dagrl, name) is getattr(sys.modules[module], name)
    assert set(dagrl.__all__) <= set(dir(dagrl))


def test_every_error_is_public() -> None:
    defined = {
        name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, errors.DagrlError)
    }
    assert defined <= set(dagrl.__all__)


def test_the_embedding_example_imports_from_dagrl_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "embed_phase.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.partition(".")[0] == "dagrl"} == {"dagrl"}
