"""Warnings of runs that do not learn: once each, after some steps in a row, with the keys to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from dagrl.errors import RunError
from dagrl.run.learning_watch import PATIENCE, LearningWatch, UpdateCount
from dagrl.telemetry.metrics import ENTROPY, EQUAL_GROUPS, KL

GOOD = {EQUAL_GROUPS: 0.4, ENTROPY: 1.0, KL: 0.01}


def warnings(steps: Sequence[dict[str, float]], caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = LearningWatch()
    with caplog.at_level(logging.WARNING, "dagrl"):
        for metrics in steps:
            watch.step(metrics)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({EQUAL_GROUPS: 1.0}, ["equal for 5 steps", "reward.function", "grpo.num_generations_per_prompt"]),
        ({ENTROPY: 0.01}, ["fell from 1 to 0.01", "loss_fn.ratio_clip_max"]),
        ({ENTROPY: 3.5}, ["grew from 1 to 3.5", "optimizer.lr"]),
        ({KL: 2.5}, ["2.5 nats", "loss_fn.reference_policy_kl_penalty"]),
    ],
)
def test_a_lasting_problem_is_warned_about_once(
    bad: dict[str, float], says: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = warnings([GOOD] + [GOOD | bad] * (3 * PATIENCE), caplog)
    assert all(words in message for words in says)


def test_a_short_problem_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    bad = {EQUAL_GROUPS: 1.0, ENTROPY: 0.001, KL: 9.0}
    assert warnings(([GOOD] + [bad] * (PATIENCE - 1)) * 4, caplog) == []
    assert warnings([{"loss": 1.0}] * 3 * PATIENCE, caplog) == [], "what a step does not measure"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"grad_norm": float("nan"), "masked_minibatches": 0.0}, "the gradient norm was nan"),
        ({"grad_norm": 0.0}, "the advantages are all zero"),
        ({"masked_minibatches": 2.0}, "the reward returned None or failed for every sample"),
    ],
)
def test_steps_that_change_no_weights_end_the_run(bad: dict[str, float], says: str) -> None:
    """After `limit` of them in a row, and at the end of a run that has no others."""
    good, counted = {"grad_norm": 0.5, "masked_minibatches": 1.0}, UpdateCount()
    for metrics in (bad, bad, good, {"critic/loss": 1.0}, bad, bad):
        counted.count(metrics, 3)
    counted.check_end()
    with pytest.raises(RunError, match=rf"the last 3 steps \(policy.optimizer.max_skipped_steps\) changed no.*{says}"):
        counted.count(bad, 3)
    counted.begin("grpo", 6)
    counted.count(bad, 3)
    with nullcontext() if bad == {"grad_norm": 0.0} else pytest.raises(RunError, match=f"none of its 1 grpo steps.*{says}"):
        counted.check_end()  # rewards may be equal for a while
    alone = UpdateCount(stage="sft")
    alone.check_end()
    alone.count(bad, 3)
    with pytest.raises(RunError, match=f"learned nothing: none of its 1 sft steps.*{says}"):
        alone.check_end()
