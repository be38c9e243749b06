"""The keys that a configuration leaves open, and why each gets its value."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagrl.config import Config, Json
from dagrl.rl.algorithm import Algorithm, algorithm_of

MEGATRON, ENGINE, ROLLOUT = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation"


@dataclass
class Derived:
    """A configuration whose open keys are being filled in, and the reason of each value."""

    config: Config
    reasons: dict[str, str] = field(default_factory=dict)
    algorithm: Algorithm = field(init=False)

    def __post_init__(self) -> None:
        self.algorithm = algorithm_of(self.config)

    @property
    def generates(self) -> bool:
        """Whether the algorithm learns from completions that generation workers make."""
        return self.algorithm.learns_from == "samples"

    @property
    def colocated(self) -> bool:
        """Whether train and generation workers share their GPUs, as far as is known by now."""
        generation = self.config.policy.generation
        return self.generates and generation is not None and generation.colocated.enabled

    def open(self, *keys: str) -> bool:
        """Returns whether the user left all of `keys` open."""
        return all(key in self.reasons or not self.config.is_set(key) for key in keys)

    def set(self, key: str, value: Json, reason: str) -> None:
        """Sets `key` if it is open."""
        if self.open(key):
            self.config = self.config.with_keys({key: value})
            self.reasons[key] = reason
