"""Counterfactual steps: recorded samples become the batch of their step again, and what cannot be replayed is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dagrl.config.file import load_run_config
from dagrl.errors import ConfigError
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.rollout.batches import scored_batch
from dagrl.run.checkpoint_store import CheckpointStore, TrainState
from dagrl.run.counterfactual import MinibatchComparison, newest_checkpoint, recorded_groups, replay_step, report
from dagrl.telemetry.rollouts import read_rollouts, rollout_files
from tests.unit.run.saving import saving
from tests.unit.telemetry.run_directory import make_run

CONFIG = (
    "name: run\nalgorithm: grpo\npolicy: {model_name: models/qwen, generation: {max_new_tokens: 16}}\n"
    "sft: {max_num_steps: 0}\ndata: {path: train.jsonl}\n"
    "grpo: {num_prompts_per_step: 1, num_generations_per_prompt: 4, max_num_steps: 8}\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = make_run(tmp_path, "run")
    (directory / "config.yaml").write_text(CONFIG)
    return directory


def test_recorded_samples_are_the_batch_of_their_step(run: Path) -> None:
    config, rows = load_run_config(run), read_rollouts(rollout_files(run / "rollouts")[2])
    batch = scored_batch(algorithm_of(config), recorded_groups(config, rows), 2)
    assert batch["row_ids"].tolist() == [8, 9, 10, 11], "group 2, four samples each"
    for row, sample in enumerate(rows):
        length = len(sample["prompt_tokens"]) + len(sample["tokens"])
        assert batch["tokens"][row, :length].tolist() == sample["prompt_tokens"] + sample["tokens"]
        assert batch["loss_mask"][row, 3:length].tolist() == [float(one) for one in sample["sampled"]]
        assert batch["generation_logprobs"][row, 3:length] == pytest.approx(
            np.where(sample["sampled"], sample["logprobs"], 0)
        )
    rewards = np.array([0, 0.25, 0.5, 0.75])
    others = np.array([np.delete(rewards, place) for place in range(4)])
    expected = (rewards - others.mean(1)) / (others.std(1, ddof=1) + 1e-6)  # NeMo-RL's leave-one-out baseline
    np.testing.assert_allclose(batch["advantages"].max(1) + batch["advantages"].min(1), expected, rtol=1e-5)


def test_another_filter_and_shaping_apply_to_recorded_samples(run: Path) -> None:
    rows = [dict(row) for row in read_rollouts(rollout_files(run / "rollouts")[1])]
    rows[1] |= {"finish_reason": "length", "dropped": "overlong"}
    rows[2] |= {"dropped": "no_reward"}
    trained = {}
    for override in ("false", "true"):
        config = load_run_config(run, [f"grpo.overlong_filtering={override}"])
        batch = scored_batch(algorithm_of(config), recorded_groups(config, rows), 1)
        trained[override] = batch["loss_mask"].any(axis=1).tolist()
    assert trained == {"false": [True, True, False, True], "true": [True, False, False, True]}
    shaped = load_run_config(run, ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=10"])
    (group,) = recorded_groups(shaped, rows)
    assert group.values[0] == pytest.approx(-0.5), "11 tokens of 16, of which the last 10 cost up to 1"


def test_a_replay_rejects_what_it_cannot_do_before_anything_starts(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml; expected the directory of a run"):
        replay_step(tmp_path, 1, [])
    with pytest.raises(ConfigError, match=r"--step 3: .* has samples of 1 to 2"):
        replay_step(run, 3, [])
    with pytest.raises(ConfigError, match="policy cannot differ in a replay"):
        replay_step(run, 2, ["policy.precision=bfloat16"])
    (run / "config.yaml").write_text(CONFIG + "loss_fn: {reference_policy_kl_penalty: 0}\n")
    with pytest.raises(ConfigError, match="needs the column reference_logprobs"):
        replay_step(run, 2, ["loss_fn.reference_policy_kl_penalty=0.1"])
    rollout_files(run / "rollouts")[1].unlink()
    with pytest.raises(ConfigError, match="no samples of step 1; choose a step behind a later checkpoint"):
        replay_step(run, 2, [])
    (run / "config.yaml").write_text(CONFIG.replace("grpo\n", "sft\n", 1))
    with pytest.raises(ConfigError, match="steps of runs that learn from samples are replayed"):
        replay_step(run, 2, [])


def test_a_replay_starts_from_the_newest_checkpoint_before_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 4, 6):
        with saving(store, TrainState(step)):
            pass
    roots = (tmp_path / "moved", tmp_path / "checkpoints")
    found = [newest_checkpoint(roots, range(step)) for step in (2, 3, 6, 9)]
    assert [start and start.step for start in found] == [None, 2, 4, 6]


def test_the_table_has_means_over_minibatches() -> None:
    first = MinibatchComparison({"loss": 1.0, "grad_norm": 2.0}, {"loss": 3.0, "grad_norm": 1.0}, 0.5)
    second = MinibatchComparison({"loss": 2.0, "grad_norm": 4.0}, {"loss": 5.0, "grad_norm": 3.0}, 0.5)
    rows = {line[:40].strip(): line[40:].split() for line in report(7, [first, second]).splitlines()}
    assert rows["loss"] == ["1.5", "4"] and rows["gradient norm"] == ["3", "2"]
    assert rows["cosine of the two gradients"] == ["0.500000,", "0.500000"]
