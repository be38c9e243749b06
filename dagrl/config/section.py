"""What all sections of a configuration are made of: their base class, and the types of values that many have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from typing_extensions import TypeAliasType

# A named alias: pydantic follows a recursive type only through its name.
Json = TypeAliasType("Json", "str | int | float | bool | list[Json] | dict[str, Json] | None")
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy, torch and vLLM all take


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path, which holds no null byte")
    return path


PathText = Annotated[str, AfterValidator(_without_nul)]
"""The path of a file or a directory."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
