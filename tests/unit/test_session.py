"""What a session checks by itself: the metric that checkpoints go by, and a reference policy to go on with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.checkpoint import Checkpoint, TrainState
from dagrl.config import Config, GenerationConfig, PolicyConfig
from dagrl.data import Example
from dagrl.errors import ConfigError
from dagrl.loops import grpo_step
from dagrl.loops.grpo_step import start_policy, with_logprobs
from dagrl.loops.session import Session
from dagrl.loops.start import REFERENCE, check_reference, stopping_where_responses_end
from dagrl.model_init import character_tokenizer
from dagrl.shapes import Batch
from dagrl.tokenization import encode_demonstrations

STEP = {"loss": 0.5, "reward/mean": 0.1}
VALIDATED = {"validation/reward": 0.4}


def configuration(metric: str | None = None, penalty: float = 0.01) -> Config:
    keys = {"checkpointing": {"metric_name": metric}, "loss_fn": {"reference_policy_kl_penalty": penalty}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {}, **keys})


def metric(name: str | None, metrics: dict[str, float], stage: str = "grpo") -> float | None:
    session: Any = SimpleNamespace(config=configuration(name))
    return Session.metric(cast(Session, session), stage, metrics)


def test_a_checkpoint_is_ranked_by_what_its_own_step_measured() -> None:
    assert metric(None, STEP) is None
    assert metric("reward/mean", STEP) == 0.1
    assert metric("validation/reward", STEP | VALIDATED) == 0.4
    assert metric("validation/reward", STEP) is None  # not the last one measured
    assert metric("validation/reward", STEP | {"validation/loss": 1.0}, stage="sft") is None  # the phase before GRPO
    assert metric("reward/mean", VALIDATED) is None  # before the first step
    assert metric("reward/mean", {"masked_minibatches": 2.0}) is None


@pytest.mark.parametrize(
    ("name", "metrics"), [("validation/rewards", VALIDATED), ("reward", STEP), ("validation/rewards", STEP | VALIDATED)]
)
def test_a_metric_that_no_step_has_is_refused_with_those_there_are(name: str, metrics: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"metric_name is '{name}'.* it has: .*{min(metrics)}"):
        metric(name, metrics)


@pytest.mark.parametrize(("penalty", "kept"), [(0.01, True), (0.0, False)])
def test_a_reference_policy_is_kept_for_a_penalty_alone(penalty: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("refit", "calibrate_on_prompts"):
        monkeypatch.setattr(grpo_step, name, lambda *args: {})
    session: Any = MagicMock(config=configuration(penalty=penalty), resumed=None, step=3)
    start_policy(session, MagicMock())
    called = [call.args[0] for call in session.train.call.call_args_list]
    assert called == [*(["snapshot_reference"] if kept else []), "reset_optimizer"]


def test_a_batch_without_a_token_in_the_loss_has_no_entropy() -> None:
    rows = {"tokens": np.ones((2, 3), np.int64), "lengths": np.array([3, 2])}
    values = np.ones((2, 3), np.float32)
    scored = Batch({"lengths": rows["lengths"], "logprobs": values, "entropy": values})
    session: Any = MagicMock(config=configuration(penalty=0.0))
    session.replay.return_value = scored
    for mask, expected in ((values, {"policy/entropy": 1.0}), (0 * values, {})):
        assert with_logprobs(session, Batch({**rows, "loss_mask": mask}))[1] == expected


def test_generation_stops_where_demonstrations_end() -> None:
    """Whatever the model's own config.json says; a stop token that the user named stays, and none is named twice."""
    tokenizer = character_tokenizer("01")
    (row,) = encode_demonstrations([Example("0", "1", source="row 1")], tokenizer)
    config = configuration().model_copy(update={"policy": PolicyConfig(generation=GenerationConfig(stop_token_ids=(4,)))})
    resolved = stopping_where_responses_end(config, tokenizer)
    assert resolved.policy.generation is not None
    assert resolved.policy.generation.stop_token_ids == (4, row.tokens[-1])
    assert stopping_where_responses_end(resolved, tokenizer) == resolved
    assert stopping_where_responses_end(configuration(), tokenizer) == configuration()


def test_a_checkpoint_without_a_reference_policy_is_refused_by_a_run_that_needs_it() -> None:
    without = Checkpoint(Path("step_00000003"), TrainState(3, counters={REFERENCE: False}))
    check_reference(configuration(penalty=0.0), without)
    check_reference(configuration(), Checkpoint(Path("step_00000003"), TrainState(3, counters={REFERENCE: True})))
    check_reference(configuration(), Checkpoint(Path("step_00000001"), TrainState(1, counters={"sft_sampler": {}})))
    with pytest.raises(ConfigError, match=r"penalty is 0\.01, but step_00000003 has no reference policy"):
        check_reference(configuration(), without)
