"""A configuration whose open keys are being filled in, and where these keys are."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from dagrl.config import Config, Json

TRAIN, ENGINE, ROLLOUT = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation"


@dataclass
class Derived:
    """A configuration whose open keys are being filled in, and the reason of each value."""

    config: Config
    reasons: dict[str, str] = field(default_factory=dict)

    def open(self, *keys: str) -> bool:
        """Whether the user left all of `keys` open."""
        return all(key in self.reasons or not is_set(self.config, key) for key in keys)

    def set(self, key: str, value: Json, reason: str) -> None:
        """Sets `key` if it is open."""
        if self.open(key):
            self.config = self.config.with_keys({key: value})
            self.reasons[key] = reason


def is_set(section: BaseModel, key: str) -> bool:
    """Whether the user set a key such as `a.b`."""
    name, _, rest = key.partition(".")
    below = getattr(section, name, None)
    return name in section.model_fields_set and (not rest or (isinstance(below, BaseModel) and is_set(below, rest)))
