"""How long something may take, together with the key of the configuration that says so: errors name both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """Seconds that a call, or the start of a process, may take, and the key that sets them."""

    seconds: float
    key: str

    @property
    def missed(self) -> str:
        """What is said of an answer that did not come in time."""
        return f"no answer within {self.key} = {self.seconds:g} s"

    def times(self, factor: int) -> Deadline:
        """A multiple of it."""
        return Deadline(factor * self.seconds, f"{factor} * {self.key}")
