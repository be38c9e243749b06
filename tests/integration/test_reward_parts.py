"""A run over a mixture of two tasks, with several rewards, an environment with rewards by turn, and a stop and resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.rl.environments import Step
from dagrl.run.train import train
from tests.integration.test_async_grpo import PROMPTS, Trained, configuration, one_cluster, steps_of, trained

__all__ = ["one_cluster", "trained"]  # fixtures

STEPS = 4


class CountsTurns:
    """Answers two turns and rewards each with its number."""

    def reset(self, example: Mapping[str, Any]) -> None:
        self.turns = 0

    def step(self, completion: str) -> Step:
        self.turns += 1
        return Step("99" if self.turns <= 2 else None, reward=float(self.turns))


def by_length(prompts: list[str], completions: list[str], references: list[str], completion_ids: list[list[int]]) -> Any:
    """Two parts; excludes completions with a three."""
    return [
        None if "3" in text else {"tokens": len(ids), "sevens": text.count("7")}
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


@pytest.mark.slow
def test_tasks_parts_and_turn_rewards_of_a_run(tmp_path: Path, trained: Trained) -> None:
    numbers = {"task": "tests.integration.unigram_task:numbers"}
    mixture = {"often": {**numbers, "weight": 3}, "seldom": {**numbers, "task_args": {"count": 16}, "weight": 1}}
    functions = {
        "length": {"function": f"{__name__}:by_length"},
        "seldom": {"function": "tests.integration.unigram_task:likes_sevens", "tasks": ["seldom"]},
    }
    sections: dict[str, Any] = {
        "data": {"task": None, "mixture": mixture},
        "reward": {"functions": functions, "weights": {"length/tokens": 0.5, "seldom": 10.0, "environment": 0.25}},
        "environment": {"function": f"{__name__}:CountsTurns", "max_turns": 3},
        "grpo": {"max_num_steps": 2, "val_period": 2},
    }
    train(configured(tmp_path, sections))
    sections["grpo"]["max_num_steps"] = STEPS
    config = configured(tmp_path, {**sections, "checkpointing": {"resume": True}})
    train(config)
    tasks = [group.samples[0].prompt.task for batch in trained for group in batch]
    assert len(tasks) == STEPS * PROMPTS and abs(tasks.count("often") - 0.75 * len(tasks)) <= 2
    for line, batch in zip(steps_of(config), trained, strict=True):
        samples = [sample for group in batch for sample in group.samples]
        kept = [sample for sample in samples if "3" not in sample.text or sample.prompt.task == "seldom"]
        totals = [total(sample) for sample in kept]
        sevens = [sample.text.count("7") for sample in samples if "3" not in sample.text]
        assert line["reward/excluded"] == len(samples) - len(kept)
        assert line["reward/mean"] == pytest.approx(np.mean(totals), rel=1e-5)
        assert line["reward/parts/length/sevens"] == pytest.approx(np.mean(sevens))
        by_task = [value for sample, value in zip(kept, totals, strict=True) if sample.prompt.task == "often"]
        assert line["reward/tasks/often"] == pytest.approx(np.mean(by_task), rel=1e-5)
    assert {"validation/tasks/often", "validation/tasks/seldom"} <= steps_of(config)[-1].keys()


def configured(output: Path, sections: dict[str, Any]) -> Any:
    """The unigram run without its own reward, as `reward.functions` replaces it."""
    config = configuration(output, "parts", **sections)
    plain = config.model_dump(exclude_unset=True)
    del plain["reward"]["function"]
    return type(config).model_validate(plain)


def total(sample: Any) -> float:
    """The reward of a sample, from its text and its number of rewarded turns alone."""
    made = sample.completion
    judged = made.turns - (made.finish_reason == "length" and made.sampled[-1])  # a turn that was cut off is not judged
    turns = sum(range(1, judged + 1))
    sevens = 10.0 * sample.text.count("7") / max(len(sample.text), 1) if sample.prompt.task == "seldom" else 0.0
    length = 0.0 if "3" in sample.text else 0.5 * len(made.tokens) + sample.text.count("7")
    return length + sevens + 0.25 * turns
