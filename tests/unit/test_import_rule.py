"""Who may import what, read from the source of every file; and what the command's import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ("dagrl", "graphs", "workers")
ENGINE = ("ray.dag", "ray.experimental", "ray._raylet", "ray._private")
IMPORT_FUNCTIONS = {"import_module", "__import__", "find_spec", "load_attribute", "load_class", "load_callable"}
FILES = [path.relative_to(ROOT) for package in LIBRARY for path in sorted((ROOT / package).rglob("*.py"))]


def imports(source: str) -> Iterator[tuple[int, str]]:
    """`(line, module)` for every import in a source text: at the top, in functions, for types only, or by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole path"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in IMPORT_FUNCTIONS and node.args:
            if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value.replace(":", ".")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_imports_are_seen_wherever_they_stand() -> None:
    text = """
import a.b
def f():
    from c import d
    importlib.import_module("e.f")
    load_class("g:h", "key")
"""
    assert [module for _, module in imports(text)] == ["a.b", "c.d", "e.f", "g.h"]
    assert inside("ray.dag.InputNode", *ENGINE) and not inside("ray.dagger", *ENGINE)
    assert len(FILES) > 40  # the walk found the library


@pytest.mark.parametrize("file", FILES, ids=str)
def test_packages_import_only_what_they_may(file: Path) -> None:
    found = list(imports((ROOT / file).read_text(encoding="utf-8")))
    package = file.parts[0]
    if package == "dagrl":
        assert not [item for item in found if inside(item[1], "graphs", "workers")], "dagrl finds these by import paths"
    assert not [item for item in found if inside(item[1], "tests", "bench")]
    if package == "graphs":
        assert not [item for item in found if inside(item[1], "workers", "ray")], "phases are plain data"
    if file.parts[:2] not in {("dagrl", "executors"), ("dagrl", "channels")}:
        assert not [item for item in found if inside(item[1], *ENGINE)], "Ray's own parts belong to the executors"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_library_does_not_print(file: Path) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")]
    assert not lines, "log, or return the text"


HEAVY = {"ray", "torch", "megatron", "vllm", "transformers", "matplotlib", "cupy"}


@pytest.mark.parametrize(
    "module", ["dagrl.cli", "dagrl.phase", "dagrl.draw", "dagrl.config", "graphs.train", "workers.megatron", "workers.vllm"]
)
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}\nsys.stdout.write(','.join(sorted(name.partition('.')[0] for name in sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert not HEAVY & set(output.stdout.split(","))
