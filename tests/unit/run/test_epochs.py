"""Epochs as a limit of a run, in addition to the limit in steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.data import Sampler
from dagrl.data.tokenization import Demonstration, Prompt
from dagrl.run.preflight import Inputs, limit_steps


def limited(demonstrations: int, prompts: int, sft: dict[str, Any], grpo: dict[str, Any]) -> Config:
    config = Config.model_validate(
        {
            "name": "epochs",
            "algorithm": "grpo",
            "policy": {"train_global_batch_size": 8},
            "sft": sft,
            "grpo": {"num_prompts_per_step": 4, **grpo},
            "data": {},
        }
    )
    tokens = np.zeros(2, np.int64)
    rows = [Demonstration(tokens, tokens.astype(np.float32), "")] * demonstrations
    asked = [Prompt("", tokens, "", "")] * prompts
    inputs = Inputs(config, {}, None, {}, rows, [], asked, [])  # type: ignore[arg-type]
    return limit_steps(config, inputs)


@pytest.mark.parametrize(("epochs", "steps"), [(None, 20), (1, 4), (2, 7), (9, 20)])
def test_a_run_ends_at_the_first_limit(epochs: int | None, steps: int) -> None:
    limits = {"max_num_steps": 20, "max_num_epochs": epochs}
    config = limited(27, 13, limits, limits)
    assert (config.sft.max_num_steps, config.grpo.max_num_steps) == (steps, steps)  # 27 in eights, 13 in fours


def test_the_steps_of_an_epoch_draw_every_example() -> None:
    config = limited(27, 0, {"max_num_steps": 100, "max_num_epochs": 2}, {})
    sampler = Sampler({"": range(27)}, {"": 1.0}, seed=5)
    drawn = sampler.take(8 * config.sft.max_num_steps)
    assert min(drawn.count(example) for example in range(27)) == 2
    assert config.grpo.max_num_steps == 100  # without prompts nothing limits it
