"""Samples whose environment or reward fails: they are counted and not trained on, and too many end the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dagrl.config import Config
from dagrl.errors import RunError
from dagrl.run.loops.policy_update import PolicyTrainer
from dagrl.run.train import train
from dagrl.runtime.shapes import Batch
from tests.integration.test_async_grpo import Trained, configuration, one_cluster, steps_of, trained

__all__ = ["one_cluster", "trained"]  # fixtures


def failing(output: Path, share: float) -> Config:
    return configuration(
        output,
        f"failing {share}",
        grpo={"max_num_steps": 3, "val_period": 3, "val_at_start": False},
        environment={"function": "tests.integration.unigram_task:SaysNinesAndFails", "max_failed_share": share},
        reward={"function": "tests.integration.unigram_task:likes_sevens_and_fails", "max_failed_share": 0.9},
        checkpointing={"enabled": False},
    )


@pytest.mark.slow
def test_failed_samples_are_not_trained_on(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted. Loss, baseline and mean use the other samples only."""
    batches: list[Batch] = []
    submit = PolicyTrainer.submit_steps
    monkeypatch.setattr(PolicyTrainer, "submit_steps", lambda self, *args: batches.append(args[0]) or submit(self, *args))
    config = failing(tmp_path, share=0.9)
    train(config)
    for batch, groups, line in zip(batches, trained, steps_of(config), strict=True):
        samples = [sample for group in groups for sample in group.samples]
        asked = [sample.completion.finish_reason != "environment_failed" for sample in samples]
        judged = ["8" not in sample.text and sample.prompt.text != "4=" for sample in samples]
        good = np.array(asked) & np.array(judged)
        assert [group.valid.tolist() for group in groups] == good.reshape(len(groups), -1).tolist()
        assert batch["loss_mask"].any(axis=1).tolist() == good.tolist()
        rewards = np.array([sample.text.count("7") / max(len(sample.text), 1) for sample in samples])
        assert line["reward/mean"] == pytest.approx(rewards[good].mean(), abs=1e-6)
        assert (line["reward/failures"], line["environment/failures"]) == (judged.count(False), asked.count(False))
        check_baselines(batch, rewards.reshape(len(groups), -1), good.reshape(len(groups), -1))
    failures = [line[f"{name}/failures"] for line in steps_of(config) for name in ("reward", "environment")]
    assert sum(failures[::2]) > 0 and sum(failures[1::2]) > 0
    validation = {f"validation/{name}" for name in ("reward", "reward_failures", "environment_failures")}
    assert validation <= steps_of(config)[-1].keys()


def check_baselines(batch: Batch, rewards: npt.NDArray[np.float64], good: npt.NDArray[np.bool_]) -> None:
    """Default advantages of valid samples: less the mean of the others, divided by their deviation if they have one."""
    found = batch["advantages"].max(axis=1) + batch["advantages"].min(axis=1)  # 0 outside the loss, one value inside
    for row, values, kept in zip(found.reshape(rewards.shape), rewards, good, strict=True):
        expected = np.zeros_like(values)
        for place in np.flatnonzero(kept) if kept.sum() > 1 else ():
            others = values[kept & (np.arange(len(values)) != place)]
            deviation = others.std(ddof=1) if len(others) > 1 else 0.0
            expected[place] = (values[place] - others.mean()) / (deviation + 1e-6 if deviation > 1e-9 else 1.0)
        np.testing.assert_allclose(row, expected, atol=1e-4)


@pytest.mark.slow
def test_an_environment_that_fails_too_often_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"environment failed for .*\.max_failed_share = 0\.01: .*no zeros"):
        train(failing(tmp_path, share=0.01))
