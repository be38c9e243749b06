"""Reads a configuration file and the `a.b=c` words of the command line into a `Config`.

Every error names the key, where it was written (file and line, or the command line), what was found and what was expected.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.imports import did_you_mean

Key = tuple[str | int, ...]
Places = dict[Key, str]

COMMAND_LINE = "command line"
_TOO_DEEP = "is nested deeper than can be read; write it with fewer levels"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The checked configuration of a YAML file with overrides such as `policy.train_micro_batch_size=4` applied in order.

    The value of an override is YAML. Raises ConfigError, which lists everything that is wrong.
    """
    content, places = _read_yaml(Path(path))
    for word in overrides:
        _override(content, word, places)
    try:
        return Config.model_validate(content)
    except ValidationError as error:
        problems = [_describe(problem, places, str(path)) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> tuple[dict[str, Json], Places]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file {str(path)!r} (looked in {Path.cwd()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {str(path)!r} cannot be read: {error}") from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
        places: Places = {}
        _note_places(node, (), str(path), places)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} {_TOO_DEEP}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {_shown(content)}; expected: a mapping with 'name', 'algorithm', 'policy', ...")
    return content, places


def _note_places(node: yaml.Node | None, key: Key, file: str, places: Places) -> None:
    """Record the line of every key below `node`; a key that is written twice is an error."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            below = (*key, name.value)
            place = f"{file}, line {name.start_mark.line + 1}"
            if name.value in seen:
                raise ConfigError(f"{_dotted(below)} ({place}) is written a second time; keep one of the two")
            seen.add(name.value)
            places[below] = place
            _note_places(value, below, file, places)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            places[(*key, index)] = f"{file}, line {value.start_mark.line + 1}"
            _note_places(value, (*key, index), file, places)


def _override(content: dict[str, Json], word: str, places: Places) -> None:
    dotted, equals, text = word.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{word!r} is not an override; write KEY=VALUE, for example policy.train_micro_batch_size=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of the override {word!r} is not YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the value of the override {_shown(word)} {_TOO_DEEP}") from error
    section = content
    for depth, name in enumerate(names[:-1], start=1):
        below = section.get(name)
        if below is None:
            below = section[name] = {}
            places.setdefault(tuple(names[:depth]), COMMAND_LINE)
        if not isinstance(below, dict):
            raise ConfigError(
                f"the override {word!r}: {'.'.join(names[:depth])} is {_shown(below)}, not a section with keys"
            )
        section = below
    section[names[-1]] = value
    for replaced in [key for key in places if key[: len(names)] == tuple(names)]:
        del places[replaced]
    places[tuple(names)] = COMMAND_LINE


def _describe(problem: Mapping[str, Any], places: Places, file: str) -> str:
    key: Key = tuple(problem["loc"])
    place = next((places[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in places), file)
    name = f"{_dotted(key)} ({place})"
    if problem["type"] == "extra_forbidden":
        section = _section_at(key[:-1])
        near = _near_misses(str(key[-1]), key[:-1], section)
        known = "" if near or section is None else f"; known here: {', '.join(section.model_fields)}"
        return f"unknown key {name}{did_you_mean(near)}{known}"
    if problem["type"] == "missing":
        return f"missing key {name}; it has no default"
    return f"{name}: found {_shown(problem['input'])}; {_expected(problem['msg'])}"


def _expected(message: str) -> str:
    for start in ("Input should be ", "String should have ", "Value error, "):
        message = message.removeprefix(start)
    return f"expected: {message}"


def _near_misses(name: str, parent: Key, section: type[BaseModel] | None) -> list[str]:
    """Close names in the same section, or the same name in another section."""
    siblings = difflib.get_close_matches(name, list(section.model_fields) if section else [], n=2)
    elsewhere = [dotted for dotted in _all_keys(Config) if dotted.rpartition(".")[2] == name]
    prefix = f"{_dotted(parent)}." if parent else ""
    return [prefix + sibling for sibling in siblings] or elsewhere[:2]


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        below = _model_of(field.annotation)
        if below is not None:
            yield from _all_keys(below, f"{prefix}{name}.")


def _section_at(key: Key) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Config
    for name in key:
        field = model.model_fields.get(str(name)) if model else None
        model = _model_of(field.annotation) if field else None
    return model


def _model_of(annotation: object) -> type[BaseModel] | None:
    """The section model in an annotation `Model` or `Model | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next((model for model in map(_model_of, typing.get_args(annotation)) if model is not None), None)
    return None


def _dotted(key: Key) -> str:
    return ".".join(str(part) for part in key) or "the configuration"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
