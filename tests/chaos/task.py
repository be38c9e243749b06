"""An environment of several turns: the policy may try a sum again."""

from __future__ import annotations

from typing import Any

from dagrl.rl.environments import Step


class Again:
    """Asks again, at most `max_turns` times, until the sum is right. Sevens are rewarded, which an untrained policy has."""

    def reset(self, example: dict[str, Any]) -> None:
        self.right = example["reference"]

    def step(self, turn: str) -> Step:
        return Step(None if turn == self.right else "=", reward=float(turn.count("7")))
