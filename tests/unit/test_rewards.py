"""Reward functions run under a deadline, and one bad sample costs itself alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from dagrl.config import RewardConfig
from dagrl.errors import ConfigError, RunError
from dagrl.rewards import RewardRunner, exact_match, shuffled

FUNCTIONS = """
import os
import re
import time

def length(prompts, completions, references):
    return [float(len(completion)) for completion in completions]

def picky(prompts, completions, references):
    for completion in completions:
        if completion == "raise":
            raise ValueError("no such answer")
        if completion == "hang":
            re.fullmatch(r"(a+)+b", "a" * 60)  # holds the interpreter's lock for ages
        if completion == "die":
            os._exit(3)
    return length(prompts, completions, references)

def pid(prompts, completions, references):
    return [float(os.getpid())] * len(prompts)

def short(prompts, completions, references):
    return [1.0]

def undefined(prompts, completions, references):
    return [float("nan") if completion == "nan" else 1.0 for completion in completions]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run(function: str, completions: list[str], timeout_s: float = 5.0) -> tuple[list[float], int, str]:
    with RewardRunner(RewardConfig(function=function, timeout_s=timeout_s)) as runner:
        rewards = runner(["p"] * len(completions), completions, ["r"] * len(completions))
    return rewards.values.tolist(), rewards.failed, rewards.message


def test_exact_match() -> None:
    assert exact_match(["1+1="] * 3, ["2", " 2\n", "22"], ["2", "2", "2"]) == [1.0, 1.0, 0.0]


def test_rewards_of_a_list(functions: str) -> None:
    assert run(f"{functions}:length", ["a", "", "abc"]) == ([1.0, 0.0, 3.0], 0, "")


def test_sample_that_raises_costs_itself(functions: str) -> None:
    values, failed, message = run(f"{functions}:picky", ["ab", "raise", "abc"])
    assert (values, failed) == ([2.0, 0.0, 3.0], 1)
    assert message == "ValueError: no such answer"


def test_sample_that_hangs_or_ends_the_process_costs_itself(functions: str) -> None:
    started = time.monotonic()
    values, failed, _ = run(f"{functions}:picky", ["ab", "hang", "abc", "die"], timeout_s=0.5)
    assert (values, failed) == ([2.0, 0.0, 3.0, 0.0], 2)
    assert time.monotonic() - started < 30


def test_many_hangs_end(functions: str) -> None:
    values, failed, message = run(f"{functions}:picky", ["ab", *["hang"] * 50], timeout_s=0.3)
    assert (values[0], failed) == (2.0, 50)
    assert "timeout_s = 0.3" in message


def test_wrong_results(functions: str) -> None:
    with pytest.raises(RunError, match=r"failed for all 2 samples: ValueError: no such answer"):
        run(f"{functions}:picky", ["raise", "raise"])
    assert run(f"{functions}:undefined", ["nan", "a"]) == ([0.0, 1.0], 1, "it returned a reward that is not finite")
    assert run(f"{functions}:short", ["a", "b"])[:2] == ([1.0, 1.0], 0)  # right for one sample at a time


def test_process_lives_from_call_to_call_and_ends(functions: str) -> None:
    with RewardRunner(RewardConfig(function=f"{functions}:pid")) as runner:
        first, second = (runner(["p"], ["c"], ["r"]).values[0] for _ in range(2))
        assert first == second != os.getpid()
        assert Path(f"/proc/{int(first)}").exists()
    assert not Path(f"/proc/{int(first)}").exists()


def test_unknown_function() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function: .*has no 'exact_mach'; did you mean 'exact_match'"):
        RewardRunner(RewardConfig(function="dagrl.rewards:exact_mach"))


def test_shuffled_deals_out_the_same_rewards() -> None:
    rewards = np.arange(64, dtype=np.float32)
    dealt = shuffled(rewards, 0, 1)
    assert sorted(dealt.tolist()) == rewards.tolist()
    assert dealt.tolist() != rewards.tolist()
    assert shuffled(rewards, 0, 1).tolist() == dealt.tolist() != shuffled(rewards, 0, 2).tolist()
