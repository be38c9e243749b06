"""Environments whose process is lost: one sequence fails, and the others are stepped through their turns again."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest

from dagrl.config import EnvironmentConfig
from dagrl.data.tokenization import Prompt
from dagrl.rl.environments import FAILED, EnvironmentRunner, Question, Reply, Step
from dagrl.run.model import character_tokenizer


class Counts:
    """Counts turns, unless it is told to end its process or to hang."""

    def reset(self, example: Any) -> None:
        self.turns = 0

    def step(self, completion: str) -> Step:
        if completion == "die":
            os._exit(3)
        if completion == "hang":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the GIL for hours
        self.turns += 1
        return Step(f"turn {self.turns}", reward=len(completion))


@pytest.mark.parametrize("end", ["die", "hang"])
def test_a_lost_process_fails_one_episode(end: str) -> None:
    config = EnvironmentConfig(function=f"{__name__}:Counts", timeout_s=1.0)
    prompt = Prompt("1", np.array([1]), "", "row 0")
    with EnvironmentRunner(config, character_tokenizer("0123456789")) as runner:

        def ask(*episodes: tuple[str, list[str]]) -> list[Reply]:
            return runner.submit(0, [Question(name, prompt, 7, turns) for name, turns in episodes]).result()

        ask(("a", ["x"]))
        bad, good = ask(("b", [end]), ("a", ["x", "xy"]))
        assert good == Reply("turn 2", reward=2.0), "both turns count, and the reward is that of the last"
        assert bad.reason == FAILED
        assert ask(("a", ["x", "xy", "z"])) == [Reply("turn 3", reward=1.0)]
