"""Learning rates against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dagrl.config import Config
from dagrl.workers.train.optimizer import OptimizerSteps

WARMUP, DECAY, START, PEAK, END = 4, 20, 1e-5, 1e-3, 1e-4


def cosine(part: float) -> float:
    return END + (PEAK - END) * (1 + math.cos(math.pi * part)) / 2


def linear(part: float) -> float:
    return END + (PEAK - END) * (1 - part)


def schedule_of(settings: dict[str, Any]) -> OptimizerSteps:
    return OptimizerSteps(Config.model_validate({"name": "x", "data": {}, **settings}))


@pytest.mark.parametrize(("style", "after"), [("constant", lambda part: PEAK), ("linear", linear), ("cosine", cosine)])
def test_learning_rates_are_those_of_the_formula(style: str, after: Any) -> None:
    scheduler = {"lr_decay_style": style, "lr_warmup_iters": WARMUP, "lr_warmup_init": START, "lr_decay_iters": DECAY}
    policy = {"optimizer": {"lr": PEAK, "min_lr": END}, "scheduler": scheduler}
    made = schedule_of({"algorithm": "sft", "policy": policy})
    for step in range(DECAY + 5):
        if step <= WARMUP:
            expected = START + (PEAK - START) * step / WARMUP
        else:
            expected = after(min(1.0, (step - WARMUP) / (DECAY - WARMUP)))
        assert made.rate == pytest.approx(expected, rel=1e-9), step
        made.taken += 1


@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 2 * 10), ("sft", 7)])
def test_by_default_the_schedule_ends_after_the_last_optimizer_step(algorithm: str, steps: int) -> None:
    """Ten GRPO steps of two minibatches decay over twenty optimizer steps; the twenty-first has the final rate."""
    grpo = {"max_num_steps": 10, "num_prompts_per_step": 8, "num_generations_per_prompt": 16}
    rates = {"optimizer": {"lr": PEAK, "min_lr": END}, "scheduler": {"lr_decay_style": "linear"}}
    policy = {**rates, "train_global_batch_size": 64}
    made = schedule_of({"algorithm": algorithm, "policy": policy, "grpo": grpo, "sft": {"max_num_steps": 7}})
    for step in range(steps + 1):
        assert made.rate == pytest.approx(linear(step / steps), rel=1e-9)
        made.taken += 1
