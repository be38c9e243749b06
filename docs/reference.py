"""Writes docs/reference: every configuration key, defaults beside NeMo-RL's, the public API, and a line about each file.

make reference      # a test fails while the committed pages are not current
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dagrl.config import Config

ROOT = Path(__file__).parents[1]
CONSTRAINTS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

Schema = dict[str, Any]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign

API: dict[str, tuple[str, ...]] = {
    "dagrl": (),  # all that it exports
    "dagrl.runtime.worker": ("WorkerHooks",),
    "dagrl.refit": ("WeightSlice", "RefitSender", "RefitReceiver", "RefitReport", "RankPlan", "commit_together"),
    "dagrl.refit.sources": ("slices_of", "tensors_of"),
    "dagrl.channels": ("open_channel", "ChannelSpec", "Channel"),
    "dagrl.rl.algorithm": ("algorithm_for",),
    "dagrl.rl.losses": ("batch_loss", "Denominators", "LossOutput"),
    "dagrl.telemetry.metrics": ("StepMetrics", "merge_step_metrics"),
    "dagrl.workers.train.hf_export": ("export_hf",),
    "dagrl.workers.train.kept_logprobs": ("KeptLogprobs",),
    "dagrl.workers.train.optimizer": ("OptimizerSteps",),
    "dagrl.embed.verl": ("accelerate",),
    "dagrl.embed.nemo_rl": ("accelerate",),
    "dagrl.graphs.pipeline": ("pipeline_phase", "split_microbatches", "PipelineWorker"),
}
"""The public names, by the module from which users import them."""


def pages() -> dict[str, str]:
    """Returns the generated pages by file name."""
    return {
        "configuration.md": configuration_reference(),
        "nemo-rl.md": nemo_rl_comparison(),
        "api.md": api_reference(),
        "files.md": file_map(),
    }


def configuration_reference() -> str:
    """Returns the page of all configuration keys: a table per section."""
    schema = Config.model_json_schema()
    lines = [
        "# Configuration",
        "",
        "Every key of a run's YAML file, by section. `a.b=c` on the command line overrides `b` of section `a`.",
        "`dagrl config CONFIG` prints a resolved configuration, `dagrl config --schema` this page as JSON schema.",
        "Keys without a default are required.",
    ]
    lines += section_lines("", schema, schema["$defs"])
    return "\n".join(lines) + "\n"


def nemo_rl_comparison() -> str:
    """Returns the page that compares defaults with NeMo-RL's, from `docs/nemo_rl.yaml`."""
    schema = Config.model_json_schema()
    lines = [
        "# Defaults and NeMo-RL's",
        "",
        "Keys with NeMo-RL's names have its meaning. Its defaults are those of `examples/configs/grpo_math_1B.yaml`, and of",
        "`sft.yaml` for the section `sft`. Derived values are logged at the start and saved in the run's `config.yaml`,",
        "each with its reason; `dagrl train CONFIG --dry-run` prints them.",
        "",
        "| key | NeMo-RL | dagrl | why |",
        "|---|---|---|---|",
    ]
    for row in yaml.safe_load((ROOT / "docs" / "nemo_rl.yaml").read_text(encoding="utf-8")):
        ours = default_of(field_at(row["key"], schema), required=False)
        lines.append(f"| `{row['key']}` | `{json.dumps(row['nemo'])}` | {ours} | {row.get('why', '')} |")
    return "\n".join(lines) + "\n"


def file_map() -> str:
    """Returns the page with the first docstring line of every file, by room."""
    lines = ["# Files", "", "The first line of each file, by room."]
    for package in sorted({path.parent for path in (ROOT / "dagrl").rglob("*.py")}):
        lines += ["", f"## `{package.relative_to(ROOT)}`", "", first_line(package / "__init__.py"), ""]
        lines += ["| file | |", "|---|---|"]
        modules = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
        lines += [f"| `{path.name}` | {first_line(path)} |" for path in modules]
    return "\n".join(lines) + "\n"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, for a table cell."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else None
    return (docstring or "").partition("\n")[0].rstrip(".").replace("|", "\\|")


def configuration_keys() -> list[tuple[str, Schema]]:
    """Returns every key that holds a value, with its field; the sections of a mapping are counted once, as `a.*.b`."""
    schema = Config.model_json_schema()
    return list(value_keys("", schema, schema["$defs"]))


def value_keys(name: str, section: Schema, sections: dict[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """Yields the keys of a section and those below it, without those that hold a section."""
    for key, field in section["properties"].items():
        path = f"{name}.{key}" if name else key
        values = field.get("additionalProperties")
        child, each = section_of(field, sections), section_of(values, sections) if isinstance(values, dict) else None
        if child is not None:
            yield from value_keys(path, child, sections)
        elif each is not None:
            yield from value_keys(f"{path}.*", each, sections)
        else:
            yield path, field


def field_at(key: str, schema: Schema) -> Schema:
    """Returns the field of the key `a.b.c`."""
    *sections, name = key.split(".")
    section = schema
    for part in sections:
        section = section_of(section["properties"][part], schema["$defs"]) or {}
    field: Schema = section["properties"][name]
    return field


def section_lines(name: str, section: Schema, sections: dict[str, Schema]) -> Iterator[str]:
    """Yields the Markdown of a section and then of the sections below it."""
    if name:
        yield from ("", f"## `{name}`", "", section.get("description", "").replace("\n", " "))
    below: dict[str, Schema] = {}
    rows = []
    for key, field in section["properties"].items():
        path = f"{name}.{key}" if name else key
        values = field.get("additionalProperties")
        child, each = section_of(field, sections), section_of(values, sections) if isinstance(values, dict) else None
        if each is not None:
            below[f"{path}.*"] = each
            rows.append(f"| [`{key}`](#{anchor(path)}) | mapping to sections | | {meaning(field)} |")
        elif child is None:
            default = default_of(field, key in section.get("required", ()))
            rows.append(f"| `{key}` | {type_of(field)} | {default} | {meaning(field)} |")
        else:
            below[path] = child
            if "properties" in child:
                kind = "section, or null" if "anyOf" in field else "section"
                link = f"[`{key}`](#{anchor(path)})"
                rows.append(f"| {link} | {kind} | | {meaning(field) or meaning(child)} |")
    yield from ("", "| key | type | default | meaning |", "|---|---|---|---|", *rows)
    for path, child in below.items():
        yield from section_lines(path, child, sections)


def anchor(path: str) -> str:
    """The anchor of a section's heading, as mkdocs makes it."""
    return path.replace(".", "").replace("*", "")


def section_of(field: Schema, sections: dict[str, Schema]) -> Schema | None:
    """The section that a field holds, or None if it holds a value."""
    for option in (field, *field.get("anyOf", ())):
        found = sections.get(option.get("$ref", "").rpartition("/")[2])
        if found is not None and "properties" in found:
            return found
    return None


def type_of(field: Schema) -> str:
    """A field's type in words, with its bounds."""
    if "anyOf" in field:
        return ", or ".join(type_of(option) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        return "any value"
    if field["type"] == "array":
        return f"list of {type_of(field['items'])}"
    if field["type"] == "object":
        values = field.get("additionalProperties", {})
        return f"mapping to {type_of(values)}" if isinstance(values, dict) and values else "mapping"
    bounds = " and ".join(f"{sign} {field[bound]}" for bound, sign in CONSTRAINTS.items() if bound in field)
    return f"{field['type']} {bounds}".strip()


def default_of(field: Schema, required: bool) -> str:
    """A field's default as YAML or what it is derived from; nothing if it is required."""
    if "derived" in field:
        return f"derived: {field['derived']}"
    return "" if required else f"`{json.dumps(field.get('default'))}`"


def meaning(field: Schema) -> str:
    """A field's description in one table cell."""
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


def api_reference() -> str:
    """Returns the page of the public names, with signatures and docstrings."""
    lines = [
        "# Python API",
        "",
        "Import these names from the module above them. Everything else is internal and may change in any release.",
    ]
    for module, names in API.items():
        lines += ["", f"## `{module}`"]
        for name in names or exported(module):
            lines += ["", *definition_lines(name, definition_of(module, name))]
    return "\n".join(lines) + "\n"


def parsed(module: str) -> ast.Module:
    """The syntax tree of a module of dagrl."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def exported(module: str) -> list[str]:
    """The names that a module passes on (`from x import y as y`)."""
    imports = (node for node in ast.walk(parsed(module)) if isinstance(node, ast.ImportFrom))
    return sorted(alias.name for node in imports for alias in node.names if alias.asname == alias.name)


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def definition_of(module: str, name: str) -> Definition:
    """The statement that defines a public name, in its module or where that imports it from."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return definition_of(node.module, name)
        if isinstance(node, Definition) and name in names_of(node):
            return node
    raise LookupError(f"{module} neither defines nor imports {name}; correct API in docs/reference.py")


def definition_lines(name: str, node: Definition) -> Iterator[str]:
    """Yields the Markdown of a class or function: its signature, its docstring, its public methods."""
    yield from (f"### `{name}`", "", "```python", signature(node), "```")
    if not isinstance(node, ast.Assign | ast.AnnAssign) and (text := ast.get_docstring(node)):
        yield from ("", text)
    for member in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
            yield from ("", f"#### `{name}.{member.name}`", "", "```python", signature(member), "```")
            if text := ast.get_docstring(member):
                yield from ("", text)


def signature(node: Definition) -> str:
    """The source of a definition without its body; of a class, with its fields and constructor."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return ast.unparse(node)
    decorators = "".join(f"@{ast.unparse(one)}\n" for one in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
        shown = [f"    {ast.unparse(one)}" for one in node.body if isinstance(one, ast.AnnAssign) and public(one)]
        shown += [
            f"    {signature(one)}" for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        ]
        return "\n".join(
            [
                f"{decorators}class {node.name}{f'({bases})' if bases else ''}:"
                if shown
                else f"{decorators}class {node.name}{f'({bases})' if bases else ''}",
                *shown,
            ]
        )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    line = f"{word} {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) > 100:
        inner = argument_lines(node.args)
        line = "\n".join([f"{word} {node.name}(", *(f"    {one}," for one in inner), f"){returns}"])
    return decorators + line


def argument_lines(arguments: ast.arguments) -> Iterator[str]:
    """Yields the source of each argument of a function."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    for number, (one, default) in enumerate(zip(positional, defaults, strict=True), 1):
        yield with_default(one, default)
        if number == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{ast.unparse(arguments.vararg) if arguments.vararg else ''}"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield with_default(one, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def with_default(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def public(node: ast.AnnAssign) -> bool:
    return not names_of(node)[0].startswith("_")


if __name__ == "__main__":
    for name, text in pages().items():
        Path(__file__).with_name("reference").joinpath(name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(pages())} pages in docs/reference are current\n")
