"""Every public name resolves, and the embedding example needs nothing else."""

from __future__ import annotations

import ast
import sys
from inspect import ismodule
from pathlib import Path

import dagrl
from dagrl import errors

ROOT = Path(__file__).parents[2]
TREE = ast.parse((ROOT / "dagrl" / "__init__.py").read_text())


def test_every_public_name_is_what_type_checkers_see() -> None:
    seen = {
        (alias.name, node.module)
        for node in ast.walk(TREE)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    for name, module in seen:
        assert module is not None
        assert getattr(dagrl, name) is getattr(sys.modules[module], name)
    names = {name for name, _ in seen}
    found = {name for name in dir(dagrl) if not name.startswith("_") and not ismodule(getattr(dagrl, name))}
    assert found - {"annotations", "TYPE_CHECKING"} == names == set(dagrl.__all__)
    defined = {
        name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, errors.DagrlError)
    }
    assert defined <= names, "every error is public"


def test_the_embedding_example_imports_from_dagrl_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "embed_phase.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.partition(".")[0] == "dagrl"} == {"dagrl"}
