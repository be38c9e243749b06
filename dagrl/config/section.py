"""The base class of all configuration sections, and value types that several sections share."""

import os
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from typing_extensions import TypeAliasType

# Named, because pydantic resolves a recursive type only through a name.
Json = TypeAliasType("Json", "str | int | float | bool | list[Json] | dict[str, Json] | None")
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range that numpy, torch and vLLM all accept


def _path(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path without null bytes")
    return os.path.expanduser(path)  # shells leave the ~ of `data.path=~/train.jsonl` as it is


PathText = Annotated[str, AfterValidator(_path)]
"""The path of a file or a directory; `~` is the user's home."""


def derived(default: object, how: str, **bounds: float) -> Any:
    """Declares a field that a run derives if it is left open (`dagrl.run.derive`). `how` says from what, for the reference.

    `default` is its value in code that takes a `Config` without deriving anything.
    """
    return Field(default=default, json_schema_extra={"derived": how}, **bounds)  # type: ignore[call-overload]


class Section(BaseModel):
    """Base of every section. Unknown keys are errors, and values are frozen.

    The string below a field describes its key; a section without one is described by its class. These strings appear in
    `dagrl config --schema` and in the configuration reference.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def with_keys(self, values: Mapping[str, object]) -> Self:
        """Returns a copy with other values, which are not validated, at keys such as `a.b`."""
        changed = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            below = getattr(changed, name)
            if rest and isinstance(below, Mapping):  # of sections
                item, _, rest = rest.partition(".")
                new: object = {**below, item: below[item].with_keys({rest: value})}
            else:
                new = below.with_keys({rest: value}) if rest else value
            changed = changed.model_copy(update={name: new})
        return changed

    def is_set(self, key: str) -> bool:
        """Returns whether the user set a key such as `a.b`."""
        name, _, rest = key.partition(".")
        below = getattr(self, name, None)
        if rest and isinstance(below, Mapping):
            item, _, rest = rest.partition(".")
            below = below.get(item)
        return name in self.model_fields_set and (not rest or (isinstance(below, Section) and below.is_set(rest)))

    @field_validator("*", mode="before")
    @classmethod
    def _within_sense(cls, value: object, info: ValidationInfo) -> object:
        """Rejects true and false for numbers, which pydantic reads as 1 and 0, and integers beyond 64 bits."""
        types = set(_alternatives(cls.model_fields[info.field_name or ""].annotation))
        if isinstance(value, bool) and types & {int, float} and not types & {bool, Json}:
            raise ValueError("a number")
        if isinstance(value, int) and int in types and abs(value) >= 2**63:
            raise ValueError("an integer below 2**63")
        return value


def _alternatives(annotation: object) -> Iterator[object]:
    """Yields the types of a union, or the type itself, without constraints."""
    inner = [arg for arg in get_args(annotation) if isinstance(arg, type | UnionType) or get_args(arg)]
    if not inner or get_origin(annotation) in (list, tuple, dict):
        yield annotation
    else:
        for arg in inner:
            yield from _alternatives(arg)
