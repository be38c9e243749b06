"""PPO with a critic, and a teacher on workers of its own, in both loops, with the unigram model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import StopRequestedError
from dagrl.rl.algorithm import Algorithm
from dagrl.rl.rollout.batches import train_batch
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops import policy_update
from dagrl.run.session import LastStep
from dagrl.run.train import train
from dagrl.runtime.shapes import Batch
from tests.integration.main_job import GRPO, ROOT, steps_of
from tests.integration.test_async_grpo import ASYNC, HF_CONFIG, configuration
from tests.integration.unigram_workers import SIZE, TAUGHT

pytestmark = pytest.mark.usefixtures("one_cluster")

WORKERS = "tests.integration.unigram_workers"
CRITIC = {"worker": f"{WORKERS}:UnigramCritic", "optimizer": {"lr": 1.0}}
TEACHER = {"model_name": "", "worker": f"{WORKERS}:UnigramTeacher", "megatron_cfg": {"data_parallel_size": 2}}


def ppo(output: Path, name: str, **sections: Any) -> Config:
    return configuration(output, name, **{"algorithm": "ppo", "critic": CRITIC, **sections})


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[ScoredGroup], Batch, Batch]]:
    """Of each step: its groups, the batch that the policy learns, and the batch that the critic learns."""
    seen: list[tuple[list[ScoredGroup], Batch, Batch]] = []

    class Watched(policy_update.CriticStep):
        def judged_batch(self) -> Batch:
            batch = super().judged_batch()
            seen.append((groups[-1], batch, self._batch))
            return batch

    groups: list[list[ScoredGroup]] = []
    scored = policy_update.scored_batch

    def watched(algorithm: Algorithm, given: list[ScoredGroup], **options: bool) -> Batch:
        groups.append(given)
        return scored(algorithm, given, **options)

    monkeypatch.setattr(policy_update, "CriticStep", Watched)
    monkeypatch.setattr(policy_update, "scored_batch", watched)
    return seen


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, equation 16, for one row's tokens."""
    following = [*values[1:], 0.0]
    errors = [reward + gamma * after - value for reward, after, value in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def critic_step_by_hand(table: Any, batch: Batch, returns: Any) -> Any:
    """Gradient descent on half the squared errors; no value has moved from its old one, so the clip does nothing."""
    gradient, inside = np.zeros(SIZE), batch["loss_mask"] > 0
    before = np.pad(batch["tokens"][:, :-1], ((0, 0), (1, 0))) % SIZE
    np.add.at(gradient, before[inside], (table[before] - returns)[inside] / inside.sum())
    return table - CRITIC["optimizer"]["lr"] * gradient  # type: ignore[index]


@pytest.mark.slow  # test_colocated.py has a run of PPO in CI, and tests/unit advantages by hand
@pytest.mark.parametrize(
    "grpo",
    [
        pytest.param({}, id="sync"),
        pytest.param({"async_grpo": ASYNC, "num_generations_per_prompt": 1, "num_prompts_per_step": 12}, id="async"),
    ],
)
def test_advantages_and_the_critic_are_those_by_hand(grpo: dict[str, Any], tmp_path: Path, learned: list[Any]) -> None:
    """Also of a synchronous run whose first step trains the critic alone, and that is stopped and resumed."""
    warmup = 0 if grpo else 1
    config = ppo(tmp_path, "ppo", grpo=grpo, critic={**CRITIC, "warmup_steps": warmup}, ppo={"gamma": 0.9, "lam": 0.8})
    if warmup:
        with pytest.raises(StopRequestedError):
            train(config, last_step=LastStep(2))
        train(config.with_keys({"checkpointing.resume": True}))
    else:
        train(config)
    assert len(learned) == 5
    table = np.zeros(SIZE)
    lines = (tmp_path / "ppo" / "truth.jsonl").read_text().splitlines()
    truth = {line["version"]: line["logits"] for line in map(json.loads, lines)}
    for groups, batch, judged in learned:
        samples = [sample for group in groups for sample in group.samples]
        rows = train_batch(samples, np.ones(len(samples), np.float32), widths=batch["tokens"].shape[1:])
        rewards = np.concatenate([group.values for group in groups])
        inside = batch["loss_mask"] > 0
        assert (inside == (rows["loss_mask"] > 0)).all()
        before = np.pad(batch["tokens"][:, :-1], ((0, 0), (1, 0))) % SIZE
        np.testing.assert_allclose(judged["values"], table[before] * inside, atol=1e-6)
        advantages, returns = np.zeros(inside.shape), np.zeros(inside.shape)
        for row, mask in enumerate(inside):
            values = table[before[row]][mask]
            given = [0.0] * (len(values) - 1) + [float(rewards[row])]
            advantages[row, mask] = by_hand(given, values.tolist(), 0.9, 0.8)
            returns[row, mask] = advantages[row, mask] + values
        np.testing.assert_allclose(judged["returns"], returns, atol=1e-5)
        white = (advantages - advantages[inside].mean()) / advantages[inside].std(ddof=1)
        np.testing.assert_allclose(batch["advantages"], white * inside, atol=1e-4)
        table = critic_step_by_hand(table, batch, returns)
    steps = steps_of(config)
    assert all("critic/explained_variance" in step for step in steps)
    if warmup:
        assert truth[0] == truth[1] != truth[2]
        taken = steps_of(config, "critic/loss")
        assert ["loss" in line for line in taken] == [False, True, True, True, True]


def write_teacher(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, "vocab_size": SIZE}))


@pytest.mark.slow
def test_two_teachers_give_columns_by_phases_of_their_own(tmp_path: Path) -> None:
    """In the asynchronous loop. Both are the same, so the target is that of one of them."""
    write_teacher(tmp_path / "teacher")
    teacher = {**TEACHER, "model_name": str(tmp_path / "teacher")}
    second = {**teacher, "megatron_cfg": {"data_parallel_size": 1}}
    async_grpo = {"enabled": True, "in_flight_weight_updates": True}
    config = configuration(
        tmp_path, "taught", models={"first": teacher, "second": second}, grpo={"max_num_steps": 8, "async_grpo": async_grpo}
    )
    train(config.with_keys({"algorithm": "dagrl.examples.two_teachers:TwoTeachers"}))
    gaps = [step["own/reverse_kl"] for step in steps_of(config)]
    assert gaps[0] == pytest.approx(_reverse_kl(), abs=0.35)  # of a few samples
    assert np.mean(gaps[-2:]) < 0.5 * gaps[0], gaps


def _reverse_kl() -> float:
    """Returns the reverse KL of the first policy to the teacher."""
    preferred = np.linspace(-0.5, 0.5, SIZE)
    preferred[TAUGHT] = 3.0
    policy, target = (logits - np.log(np.exp(logits).sum()) for logits in (np.linspace(-0.5, 0.5, SIZE), preferred))
    return float((np.exp(policy) * (policy - target)).sum())


QUICK = (
    "algorithm=ppo",
    "sft.max_num_steps=150",
    *("grpo.max_num_steps=16", "grpo.val_period=0", "grpo.max_val_samples=16"),
    *("critic.megatron_cfg.tensor_model_parallel_size=2", "critic.optimizer.lr=1e-3"),
    *("checkpointing.enabled=false", "checkpointing.export_hf=false"),
    *("cluster.num_cpus=2", "cluster.num_gpus=0"),
)


@pytest.mark.slow
def test_ppo_learns(tmp_path: Path) -> None:
    """The critic has tensor parallelism, the policy data parallelism."""
    whole = load_config(ROOT / GRPO, (*QUICK, f"output_dir={tmp_path}"))
    train(whole)
    steps = [step for step in steps_of(whole) if step["stage"] == "ppo"]
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == 16 and np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.2, rewards
    assert np.mean([step["critic/loss"] for step in steps[-4:]]) < 0.13  # of rewards 0 or 1: at most 0.125 at a constant
