"""Every code block of the README and of the documentation's pages works, in this process.

Python blocks that only define things are executed, and what they define is called where that needs no run. Others are
excerpts of a user's program (`EXCERPTS`): they are compiled, and what they import of dagrl exists. YAML is a part of a
configuration, and commands have arguments that the command line and the configuration take.
"""

import ast
import builtins
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import dagrl
from dagrl.cli import main as command
from dagrl.config import Config, DataConfig
from dagrl.config.file import all_keys
from dagrl.data import load_splits
from dagrl.rl.trial import try_algorithm

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MINIMAL = {"name": "t", "algorithm": "grpo", "policy": {}, "data": {}}

GIVEN: dict[str, Any] = {
    **{name: getattr(dagrl, name) for name in dir(dagrl) if not name.startswith("_")},
    **{"np": np, "torch": torch, "Tensor": torch.Tensor, "Iterator": Iterator},
}
"""What blocks use without importing it: the public names, numpy and torch."""

EXCERPTS = {"README.md": 2, "algorithms.md": 1, "embed.md": 4, "refit.md": 2, "runtime.md": 4, "view.md": 1}
"""The number of excerpts of each page, so that a new one is meant to be one."""


def blocks(*kinds: str) -> list[Any]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match[2] in kinds:
                line, indent = text[: match.start()].count("\n") + 1, len(match[1])
                code = "".join(row[indent:] if row.strip() else row for row in match[3].splitlines(keepends=True))
                found.append(pytest.param(code, id=f"{page.name}:{line}"))
    return found


def names_bound(tree: ast.Module) -> set[str]:
    """Returns the names that definitions and imports bind."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.alias
    named = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return {(getattr(node, "asname", None) or node.name).partition(".")[0] for node in named}


def unknown_names(tree: ast.Module) -> set[str]:
    """Returns the names that a block reads and neither binds nor gets from `GIVEN`."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | names_bound(tree)
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound - GIVEN.keys() - set(dir(builtins))


def is_excerpt(code: str) -> bool:
    """Whether a block is a part of a program of the user."""
    tree = ast.parse(code) if not code.startswith(" ") else None
    calls = [] if tree is None else [node for node in tree.body if isinstance(node, ast.Expr | ast.With)]
    texts = [node for node in calls if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    runs = len(calls) > len(texts) and "set_tracing_disabled(True)" not in code
    return tree is None or bool(unknown_names(tree)) or runs or "ray.remote" in code or "vllm" in code


FOLLOWED = ("make_dates.py",)  # files that a page has its reader write
INCOMPLETE = ("agents",)  # packages that are locked without all that they import; `make test-extras` has them whole


def require_packages(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            package = name.partition(".")[0]
            if importlib.util.find_spec(package) is None or package in INCOMPLETE:
                pytest.skip(f"needs {name}")


def test_the_excerpts_are_those_that_are_meant_to_be() -> None:
    found = [str(block.id).partition(":")[0] for block in blocks("python") if is_excerpt(block.values[0])]
    assert {page: found.count(page) for page in dict.fromkeys(found)} == EXCERPTS


@pytest.mark.parametrize("code", blocks("python"))
def test_python(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if code.startswith(" "):
        code = f"if True:\n{code}"
    tree = ast.parse(code)
    require_packages(tree)
    if is_excerpt(code.removeprefix("if True:\n")):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dagrl."):
                assert {alias.name for alias in node.names} <= defined_in(str(node.module))
        return
    module = ModuleType("block_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__dict__.update(GIVEN)
    exec(compile(tree, "<block>", "exec"), module.__dict__)  # noqa: S102
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    for name in defined:
        call(getattr(module, name), f"{module.__name__}:{name}")


def defined_in(module: str) -> set[str]:
    """Returns the names that a module of dagrl has, without importing it: some import vLLM, which takes half a minute."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return names_bound(ast.parse(file.read_text(encoding="utf-8")))


def call(defined: Any, path: str) -> None:
    """Calls what a block defines if it is an algorithm, a reward of ours or an environment."""
    if isinstance(defined, type) and issubclass(defined, dagrl.Algorithm):
        try_algorithm(Config.model_validate(MINIMAL | {"algorithm": path}))
    elif isinstance(defined, type) and hasattr(defined, "reset"):
        environment = defined()
        environment.reset({"reference": "3", "messages": [], "prompt": "1+2="})
        assert environment.step("2") is not None and environment.step("3") is not None
    elif path.endswith(":score"):
        more = {"difficulty": [1.0], "metadata": [{"finish_reason": "stop"}]}
        wanted = {name: more[name] for name in list(inspect.signature(defined).parameters)[3:]}
        (answer,) = defined(["1+2="], ["3"], ["3"], **wanted)
        assert answer in (1.0, {"right": 1.0, "format": 0.0})


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml(code: str) -> None:
    Config.model_validate(MINIMAL | yaml.safe_load(code))


@pytest.mark.parametrize("code", blocks("json"))
def test_rows(code: str, tmp_path: Path) -> None:
    assert all(map(json.loads, code.splitlines()))
    (tmp_path / "rows.jsonl").write_text(code)
    for name in re.findall(r"\w+\.png", code):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert load_splits(DataConfig(path=str(tmp_path / "rows.jsonl"), val_fraction=0.0)).train


@pytest.mark.parametrize("code", blocks(""))
def test_commands(code: str) -> None:
    keys = {key for key, _ in all_keys()}
    mappings = ("loss_fn.args.", "policy.generation.vllm_kwargs.", "policy.random_init", "environment.args.")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in code.replace("\\\n", " ").splitlines():
        ours = re.match(r"(\w+=\S+ )?(dagrl|make|python) ", line)
        match shlex.split(line.partition(" > ")[0], comments=True) if ours else []:
            case ["make", target, *_]:
                assert target in targets
            case ["python", file, *_] if file.endswith(".py") and file not in FOLLOWED:
                assert (ROOT / file).is_file()
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None
            case ["dagrl", *arguments] if arguments[0] != "error:":
                options = vars(command)["_parse"](arguments)
                for override in getattr(options, "overrides", ()):
                    key = override.partition("=")[0]
                    assert key in keys or key.startswith(mappings), override


README = (ROOT / "README.md").read_text()
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "dagrl").rglob("*.py"))]
LINKING = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
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


@pytest.mark.parametrize("page", LINKING)
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
