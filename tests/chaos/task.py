"""The user's functions of the scenarios. They misbehave while the file that the environment variable names says how."""

import os
import time
import zlib
from pathlib import Path
from typing import Any

from dagrl.rl.environments import Step

CONDUCT = "DAGRL_CHAOS_CONDUCT"


def sevens(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns the share of sevens, which an untrained policy has."""
    for text in completions:
        behave(text)
    return [text.count("7") / max(len(text), 1) for text in completions]


class Again:
    """Asks again, at most `max_turns` times, until the sum is right. Sevens are rewarded."""

    def reset(self, example: dict[str, Any]) -> None:
        self.right = example["reference"]

    def step(self, turn: str) -> Step:
        behave(turn)
        return Step(None if turn == self.right else "=", reward=float(turn.count("7")))


def behave(text: str) -> None:
    """Returns, unless this is one of the texts that the file is about."""
    how, share = conduct()
    if zlib.crc32(text.encode()) % 100 >= 100 * share:
        return
    if how == "raise":
        raise ValueError("told to raise")
    if how == "end":
        os._exit(3)
    while conduct()[0] == "hang":
        time.sleep(0.1)


def conduct() -> tuple[str, float]:
    """Returns what to do, and the share of texts to do it for."""
    path = Path(os.environ.get(CONDUCT, os.devnull))
    words = path.read_text().split() if path.exists() else []
    return (words[0], float(words[1])) if words else ("", 0.0)
