"""The keys that a configuration leaves open, and why each gets its value."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagrl.config import Config, Json

MEGATRON, ENGINE, ROLLOUT = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation"


@dataclass
class Derived:
    """A configuration whose open keys are being filled in, and the reason of each value."""

    config: Config
    reasons: dict[str, str] = field(default_factory=dict)

    def open(self, *keys: str) -> bool:
        """Whether the user left all of `keys` open."""
        return all(key in self.reasons or not self.config.is_set(key) for key in keys)

    def set(self, key: str, value: Json, reason: str) -> None:
        """Sets `key` if it is open."""
        if self.open(key):
            self.config = self.config.with_keys({key: value})
            self.reasons[key] = reason
