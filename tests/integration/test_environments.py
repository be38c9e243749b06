"""Sequences of several turns across saves, stops and resumes: no question to the environment is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagrl.config import Config
from dagrl.errors import RunError, StopRequestedError
from dagrl.rl.rollout.episodes import Episode
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.trajectory_file import read_trajectories
from dagrl.run.loops.policy_update import PolicyTrainer
from dagrl.run.train import train
from dagrl.runtime.shapes import Batch
from tests.integration.test_async_grpo import (
    ASYNC,
    PROMPTS,
    TWO_ENGINES,
    Trained,
    configuration,
    numbers_of,
    one_cluster,
    steps_of,
    stop_after,
    trained,
)
from tests.integration.unigram_task import RELEASED

__all__ = ["one_cluster", "trained"]  # fixtures

EOS, NINE = 1, "9"
STEPS = 3


def turns_configuration(output: Path, workers: int = 2, **checkpointing: Any) -> Config:
    return configuration(
        output,
        "turns",
        policy=TWO_ENGINES,
        grpo={"async_grpo": ASYNC, "max_num_steps": STEPS, "val_period": 0, "val_at_start": False},
        data={"task_args": {"train_s": 0.02, "engine_step_s": 0.002}},
        environment={
            "function": "tests.integration.unigram_task:SaysNinesAfterAWhile",
            "max_turns": 3,
            "num_workers": workers,
            "timeout_s": 120.0,
        },
        checkpointing={"save_period": 1, **checkpointing},
    )


def checkpoints(config: Config) -> list[Path]:
    return sorted((Path(config.output_dir) / config.name / "checkpoints").iterdir())


def awaiting(directory: Path) -> dict[tuple[int, int], Episode]:
    """Returns the awaiting sequences of a checkpoint, by group and place."""
    saved = read_trajectories(directory)
    assert saved is not None
    return {
        (item.group.number, place): episode
        for item in saved.groups
        for place, episode in enumerate(item.group.episodes)
        if episode.awaiting
    }


def episodes_of(batches: Trained) -> Iterator[Episode]:
    return (episode for batch in batches for group in batch for episode in group.group.episodes)


def check_answered(episode: Episode) -> None:
    """After the end of a turn the environment answers, or the sequence ends."""
    for (token, sampled), (_, next_sampled) in pairwise(zip(episode.tokens, episode.sampled, strict=True)):
        if sampled and token % 16 == EOS:
            assert not next_sampled, "the policy went on after its end of sequence"
    assert episode.finish_reason in {"stop", "length"} and not episode.awaiting


@pytest.mark.slow
def test_an_open_question_in_a_checkpoint_is_asked_again(
    tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of the environment ends after the first checkpoint, from which a second run resumes."""
    monkeypatch.setenv(RELEASED, str(tmp_path / "released"))
    save = Experience.save
    monkeypatch.setattr(Experience, "save", lambda *args: (save(*args), (tmp_path / "released").touch()))
    config = turns_configuration(tmp_path)
    train(config)
    chosen, *rest = checkpoints(config)
    for later in rest:
        shutil.rmtree(later)
    open_questions, seen = awaiting(chosen), len(trained)
    train(turns_configuration(tmp_path, resume=True))
    assert [line["step"] for line in steps_of(config)] == list(range(1, STEPS + 1))
    finals = {group.group.number: group.group for batch in trained[seen:] for group in batch}
    assert open_questions
    for (number, place), asked in open_questions.items():
        final = finals[number].episodes[place]
        assert final.tokens[: len(asked.tokens)].tolist() == asked.tokens.tolist()
        assert not any(final.sampled[len(asked.tokens) : len(asked.tokens) + 2]), "the environment's two nines come next"
    for episode in episodes_of(trained):
        check_answered(episode)


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


@pytest.mark.slow
def test_a_stopped_run_keeps_open_questions(tmp_path: Path, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quanta read during the stop raise new questions. None is lost, and none counts as failed."""
    monkeypatch.setenv(RELEASED, str(tmp_path / "released"))
    (tmp_path / "released").touch()
    config = turns_configuration(tmp_path, workers=1, save_period=100)
    with stop_after(steps=1), pytest.raises(StopRequestedError):
        train(config)
    before = len(steps_of(config))
    assert len(checkpoints(config)) == 1 and 1 <= before < STEPS
    saved = read_trajectories(checkpoints(config)[0])
    assert saved is not None
    assert all(episode.finish_reason in {"", "stop", "length"} for item in saved.groups for episode in item.group.episodes)
    seen = len(trained)
    train(turns_configuration(tmp_path, workers=1, resume=True))
    done = trained[:before] + trained[seen:]
    assert sorted(numbers_of(done)) == list(range(STEPS * PROMPTS)), "every group once, over both processes"
    for episode in episodes_of(done):
        check_answered(episode)
