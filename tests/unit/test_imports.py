"""Imports in less time: what is left out of them, and where their bytecode is kept."""

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

import pytest

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
def test_bytecode_is_kept_where_an_import_would_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool, writes: bool
) -> None:
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
        cache = Path(importlib.util.cache_from_source(str(source)))
        cache.parent.mkdir()
        cache.touch()
    keep_bytecode()
    ours = str(tmp_path / "dagrl" / "bytecode") if not compiled and not writes else None
    assert sys.pycache_prefix == ours and os.environ["PYTHONPYCACHEPREFIX"] == (ours or "")
    assert sys.dont_write_bytecode == (ours is None and not writes)
