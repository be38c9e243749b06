"""Reads a configuration file and the `a.b=c` overrides of the command line into a `Config`.

Every error names the key, its location (file and line, or the command line), what was found and what was expected.
"""

import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.imports import did_you_mean

try:  # ten times as fast, but deep nesting would end the process: for texts written here
    from yaml import CSafeDumper as Dumper, CSafeLoader as Loader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeDumper as Dumper, SafeLoader as Loader  # type: ignore[assignment]

KeyPath = tuple[str | int, ...]
Locations = dict[KeyPath, str]
"""The file and line, or the command line, of each key."""

CONFIG_DIR = "${config_dir}"
"""In a string of the file: the directory that the file is in."""

COMMAND_LINE = "command line"
NEAR = 0.7
"""Least similarity of a suggested key: `model_name` is none for `reference_model_name`, which means something else."""

_TOO_DEEP = "is nested too deeply to parse; use fewer levels"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and validates a YAML file, with overrides such as `policy.train_micro_batch_size=4` applied in order.

    The value of an override is YAML. Raises ConfigError that lists every problem.
    """
    content, locations = _read_yaml(Path(path))
    for word in overrides:
        _override(content, word, locations)
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [_describe(problem, locations, str(path)) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def load_run_config(directory: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads the configuration that a run has saved. Raises ConfigError if `directory` is not one of a run."""
    file = directory / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{directory} has no config.yaml; expected the directory of a run, such as runs/grpo_quickstart")
    return load_config(file, overrides)


def dump_config(config: Config, derived: Mapping[str, str] | None = None) -> str:
    """Returns the resolved configuration as YAML, which `load_config` reads back to an equal one.

    Comments above the keys in `derived` say why they have their value.
    """
    text = yaml.dump(config.model_dump(mode="json"), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    if not derived:
        return text
    starts, lines = dict(_marks(yaml.compose(text, Loader))), text.splitlines()
    for key, reason in derived.items():
        start = starts[tuple(key.split("."))]
        lines[start.line] = f"{' ' * start.column}# derived: {reason}\n{lines[start.line]}"
    return "\n".join(lines) + "\n"


def value_text(config: Config, key: str) -> str:
    """Returns the value of the key `a.b.c` as YAML."""
    value: object = config
    for name in key.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return json.dumps(value, default=str)


def _read_yaml(path: Path) -> tuple[dict[str, Json], Locations]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {str(path)!r} (working directory: {Path.cwd()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {error}") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        marks = [*_marks(node)]  # before PyYAML merges others into mappings (`<<: *base`)
        content = None if node is None else loader.construct_document(node)
        locations: Locations = {}
        for key, mark in marks:
            location = f"{path}, line {mark.line + 1}"
            if key in locations:
                raise ConfigError(f"{_dotted(key)} ({location}) is a duplicate key; keep one of the two")
            locations[key] = location
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} {_TOO_DEEP}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains {_shown(content)}; expected: a mapping with 'name', 'algorithm', 'policy', ...")
    return {name: _in_directory(value, str(path.absolute().parent)) for name, value in content.items()}, locations


def _in_directory(value: Json, directory: str) -> Json:
    """Replaces `${config_dir}` in all strings of `value`."""
    if isinstance(value, str):
        return value.replace(CONFIG_DIR, directory)
    if isinstance(value, list):
        return [_in_directory(item, directory) for item in value]
    if isinstance(value, dict):
        return {name: _in_directory(item, directory) for name, item in value.items()}
    return value


def _marks(node: yaml.Node | None, key: KeyPath = ()) -> Iterator[tuple[KeyPath, yaml.Mark]]:
    """Yields every key below `node`, and where it starts."""
    if isinstance(node, yaml.MappingNode):
        below = [(name.value, name.start_mark, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(index, value.start_mark, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, mark, value in below:
        yield (*key, name), mark
        yield from _marks(value, (*key, name))


def _override(content: dict[str, Json], word: str, locations: Locations) -> None:
    dotted, equals, text = word.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{word!r} is not an override; expected: KEY=VALUE, such as policy.train_micro_batch_size=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {word!r} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the value of the override {_shown(word)} {_TOO_DEEP}") from error
    section = content
    for depth, name in enumerate(names[:-1], start=1):
        below = section.get(name)
        if below is None:
            below = section[name] = {}
            locations.setdefault(tuple(names[:depth]), COMMAND_LINE)
        if not isinstance(below, dict):
            raise ConfigError(
                f"the override {word!r}: {'.'.join(names[:depth])} is {_shown(below)}; expected: a section with keys"
            )
        section = below
    section[names[-1]] = value
    for replaced in [key for key in locations if key[: len(names)] == tuple(names)]:
        del locations[replaced]
    locations[tuple(names)] = COMMAND_LINE


def _describe(problem: Mapping[str, Any], locations: Locations, file: str) -> str:
    key: KeyPath = tuple(problem["loc"])
    location = next((locations[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in locations), file)
    name = f"{_dotted(key)} ({location})"
    if problem["type"] == "extra_forbidden":
        section = _section_at(key[:-1])
        near = _near_misses(str(key[-1]), key[:-1], section)
        known = "" if near or section is None else f"; known here: {', '.join(section.model_fields)}"
        return f"unknown key {name}{did_you_mean(near)}{known}"
    if problem["type"] == "missing":
        return f"missing key {name}; it is required"
    if problem["type"] == "value_error" and isinstance(problem["input"], Mapping):  # of several keys in a section
        return f"{name}: {problem['msg'].removeprefix('Value error, ')}"
    expected = re.sub("^(Input should be|String should have|Value error,) ", "", problem["msg"])
    return f"{name}: found {_shown(problem['input'])}; expected: {expected}"


def _near_misses(name: str, parent: KeyPath, section: type[BaseModel] | None) -> list[str]:
    """Returns close names in the same section, or else the same name in other sections."""
    siblings = difflib.get_close_matches(name, list(section.model_fields) if section else [], n=2, cutoff=NEAR)
    elsewhere = [dotted for dotted, _ in all_keys() if dotted.rpartition(".")[2] == name]
    prefix = f"{_dotted(parent)}." if parent else ""
    return [prefix + sibling for sibling in siblings] or elsewhere[:2]


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every key as `a.b.c` with its field, sections included, in the order of the configuration."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        below = section_of(field.annotation)
        if below is not None:
            yield from all_keys(below, f"{prefix}{name}.")


def _section_at(key: KeyPath) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Config
    for name in key:
        field = model.model_fields.get(str(name)) if model else None
        model = section_of(field.annotation) if field else None
    return model


def section_of(annotation: object) -> type[BaseModel] | None:
    """Returns the section's class if the annotation is `Section` or `Section | None`, else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next((model for model in map(section_of, typing.get_args(annotation)) if model is not None), None)
    return None


def _dotted(key: KeyPath) -> str:
    return ".".join(str(part) for part in key) or "the configuration"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
