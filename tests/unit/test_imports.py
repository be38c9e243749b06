"""Imports: in less time, by the rules of the rooms, of the public API alone in an example, and the audit of requirements."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
import zlib
from functools import cache
from importlib.machinery import SourceFileLoader
from inspect import ismodule
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dagrl
from dagrl import errors
from dagrl.imports import brief_imports, keep_bytecode


def test_unused_packages_cannot_be_imported_meanwhile() -> None:
    with brief_imports("antigravity", "sys"):
        assert importlib.util.find_spec("antigravity") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("antigravity")
    assert importlib.util.find_spec("antigravity") is not None and sys.modules["sys"] is sys


def test_packages_are_found_in_the_same_distributions() -> None:
    every = importlib.metadata.packages_distributions()
    with brief_imports():
        brief = importlib.metadata.packages_distributions()
    assert {name: sorted(brief[name]) for name in every} == {name: sorted(found) for name, found in every.items()}
    assert len(brief) < len(every) + 3, "only those with files that have been removed, as setuptools' own wheel has"


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("free", [1 << 28, 1 << 30])
def test_bytecode_is_kept_where_none_is(tmp_path: Path, monkeypatch: Any, compiled: bool, writes: bool, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    source = tmp_path / "torch" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if writes else "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if compiled:
        (cache := Path(importlib.util.cache_from_source(str(source)))).parent.mkdir()
        cache.touch()
    used, unused = (tmp_path / "dagrl" / "bytecode" / name for name in ("used", "unused"))
    used.mkdir(parents=True)
    unused.mkdir()
    os.utime(unused, (0, 0))
    keep_bytecode()
    own = f"{zlib.crc32(sys.prefix.encode()):08x}"  # of this environment
    ours = str(tmp_path / "dagrl" / "bytecode" / own) if not compiled and not writes and free > 1 << 29 else None
    assert sys.pycache_prefix == ours and os.environ["PYTHONPYCACHEPREFIX"] == (ours or "")
    assert sys.dont_write_bytecode == (ours is None and not writes)
    assert used.exists() and unused.exists() == (ours is None)
    if ours:  # what is damaged is compiled again
        loader, kept = SourceFileLoader("torch", str(source)), Path(importlib.util.cache_from_source(str(source)))
        loader.get_code("torch")
        whole = kept.read_bytes()
        for damaged in (b"", b"wrong" + whole, whole[:10], whole[:16], whole[:40], whole[:-1], whole[:16] + bytes(200)):
            kept.write_bytes(damaged)
            sys.pycache_prefix, sys.dont_write_bytecode = None, True
            keep_bytecode()
            loader.get_code("torch")
            assert kept.read_bytes() == whole


ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "dagrl").rglob("*.py"))]
FILES = [file for file in FILES if file.parts[1] not in ("bench", "examples")]


@cache
def names_of(file: Path) -> frozenset[str]:
    """The full names that a file with `ray` in it imports, wherever the import is, and its strings: imports at run time."""
    found: set[str] = set()
    text = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if re.search(r"\bray\b", text) else ():
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


def users_of(*modules: str) -> set[str]:
    """The files that import one of these modules or a part of it."""
    parts = tuple(f"{module}." for module in modules)
    return {str(file) for file in FILES if any(f"{name}.".startswith(parts) for name in names_of(file))}


def test_internals_of_ray_are_imported_where_they_are_listed() -> None:
    """`local_cluster.py` starts a lean node, and names its processes, where this Ray has the parts for that.

    `nemo_rl.py` derives a reference whose value `ray.get` asks for.
    """
    assert users_of("ray.dag") == {f"dagrl/runtime/executors/{name}.py" for name in ("dag", "ray_engine")}
    assert users_of("ray.experimental") == {"dagrl/embed/nemo_rl.py"}
    assert users_of("ray._raylet", "ray._private", "ray.core") == {"dagrl/run/local_cluster.py"}


def test_executors_reach_into_no_private_part_of_others() -> None:
    """Of Ray's, the id of an actor, and whether it takes calls in order, without which it is taken to do not."""
    found = {
        node.attr
        for file in FILES
        if file.parts[:3] == ("dagrl", "runtime", "executors")
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert found == {"_actor_id", "_replace", "_current_frames"}


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
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.DagrlError)
    }
    assert defined <= names, "every error is public"


def test_the_embedding_example_imports_from_dagrl_alone() -> None:
    tree = ast.parse((ROOT / "examples" / "embed_phase.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.partition(".")[0] == "dagrl"} == {"dagrl"}


def test_each_problem_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "requirements" / "audit.py")
    assert spec is not None and spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    lock = tmp_path / "bad.lock"
    lock.write_text(
        "# versions\nnumpy==2.3.5\nNumPy==2.3.6\nJinja2==3.1.5  # old\nray>=2.60\ngit+https://x/y.git\ntorch==2.13.0+cpu\n"
    )
    assert audit.main([str(lock)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "bad.lock, line 3: numpy is there twice",
        "bad.lock, line 4: jinja2 3.1.5 has CVE-2025-27516: sandbox escape; use 3.1.6 or later",
        "bad.lock, line 5: 'ray>=2.60' is not pinned; expected: name==version",
        "bad.lock, line 6: 'git+https://x/y.git' is not pinned; expected: name==version",
    ]
