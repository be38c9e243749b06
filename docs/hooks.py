"""Hooks of the documentation site: the configuration reference, the file map, and files that pages link to.

The reference is generated from the configuration's JSON schema, so it has every key. A page may link to any file of the
repository by its relative path; the site has a copy of it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dagrl.config import Config

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
CONSTRAINTS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

Schema = dict[str, Any]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated reference, and the linked files from outside `docs/`."""
    files.append(File.generated(config, "reference/configuration.md", content=configuration_reference()))
    files.append(File.generated(config, "reference/nemo-rl.md", content=nemo_rl_comparison()))
    files.append(File.generated(config, "reference/files.md", content=file_map()))
    for page in files.documentation_pages():
        if page.generated_by is not None:
            continue
        for target in outside_links(Path(page.abs_src_path or ""), page.content_string):
            uri = site_path(target)
            if target.is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave `docs/` at the site's copies."""
    source = page.file.abs_src_path
    if page.file.generated_by is not None or source is None:
        return markdown
    up = "../" * page.file.src_uri.count("/")

    def copied(link: re.Match[str]) -> str:
        target = (Path(source).parent / link[1]).resolve()
        return link[0] if target.is_relative_to(ROOT / "docs") else f"]({up}{site_path(target)})"

    return LINK.sub(copied, markdown)


def outside_links(page: Path, markdown: str) -> Iterator[Path]:
    """Yields the files outside `docs/` that a page links to."""
    for link in LINK.finditer(markdown):
        target = (page.parent / link[1]).resolve()
        if not target.is_relative_to(ROOT / "docs"):
            yield target


def site_path(target: Path) -> str:
    """Where the site has a file of the repository; Markdown is shown as text, so that its own links stay unread."""
    path = f"files/{target.relative_to(ROOT)}"
    return f"{path}.txt" if path.endswith(".md") else path


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
        child = section_of(field, sections)
        if child is None:
            default = default_of(field, key in section.get("required", ()))
            rows.append(f"| `{key}` | {type_of(field)} | {default} | {meaning(field)} |")
        else:
            below[path] = child
            if "properties" in child:
                kind = "section, or null" if "anyOf" in field else "section"
                link = f"[`{key}`](#{path.replace('.', '')})"
                rows.append(f"| {link} | {kind} | | {meaning(field) or meaning(child)} |")
    yield from ("", "| key | type | default | meaning |", "|---|---|---|---|", *rows)
    for path, child in below.items():
        yield from section_lines(path, child, sections)


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
