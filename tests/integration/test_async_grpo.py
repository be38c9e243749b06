"""Both GRPO loops end to end with the unigram model: equal losses at age 0, bounded ages, true versions, no lost group."""

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.checkpoint_store import read_state
from dagrl.run.loops.policy_update import PolicyTrainer, PolicyUpdate
from dagrl.run.train import train
from tests.integration.main_job import steps_of
from tests.integration.unigram_task import ASKED
from tests.integration.unigram_workers import SIZE, TRUTH

pytestmark = pytest.mark.usefixtures("one_cluster")

STEPS, PROMPTS, GENERATIONS = 5, 4, 3
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
ASYNC = {"enabled": True, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}
ON_RAY: dict[str, Any] = {"executor": "compiled", "executor_cfg": {"engine": "ray"}, "fallback": "error"}
TWO_ENGINES = {"generation": {"vllm_cfg": {"data_parallel_size": 2}}}
Trained = list[list[ScoredGroup]]


def configuration(output: Path, name: str, **sections: Any) -> Config:
    """Returns the configuration of the unigram run, with `sections` merged over it."""
    base: dict[str, Any] = {
        "name": name,
        "algorithm": "grpo",
        "output_dir": str(output),
        "executor": "eager",
        "policy": {
            "worker": "tests.integration.unigram_workers:UnigramTrainer",
            "random_init": {"hf_config": HF_CONFIG, "tokenizer_characters": "0123456789+="},
            "train_global_batch_size": PROMPTS * GENERATIONS,
            "max_total_sequence_length": 64,
            "optimizer": {"lr": 2.0},
            "generation": {
                "worker": "tests.integration.unigram_workers:UnigramGenerator",
                "max_new_tokens": 12,
                "quantum_engine_steps": 2,
                "vllm_cfg": {"data_parallel_size": 1, "max_num_seqs": 8},
            },
        },
        "sft": {"max_num_steps": 0},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GENERATIONS,
            "max_num_steps": STEPS,
            "val_period": 2,
        },
        "data": {"task": "tests.integration.unigram_task:numbers"},
        "reward": {"function": "tests.integration.unigram_task:likes_sevens", "start_timeout_s": 240.0},  # on a busy machine
        "checkpointing": {"export_hf": False, "save_period": 2},
        "logger": {"tensorboard_enabled": False, "trace_enabled": False, "log_level": "WARNING"},
        "cluster": {"num_cpus": 2},
    }
    return Config.model_validate(merge(base, sections))


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key: merge(base[key], value) if isinstance(base.get(key), dict) else value for key, value in over.items()}
    return {**base, **both}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    batches: Trained = []
    begin = PolicyTrainer.begin

    def watched(self: PolicyTrainer, groups: list[ScoredGroup], step: int) -> PolicyUpdate:
        batches.append(groups)
        return begin(self, groups, step)

    monkeypatch.setattr(PolicyTrainer, "begin", watched)
    return batches


def numbers_of(batches: Trained) -> list[int]:
    return [group.group.number for batch in batches for group in batch]


def check_versions(config: Config, batches: Trained, max_age: int) -> Counter[int]:
    """Checks ages, and each log-probability against the recorded version; counts ages by token."""
    lines = (Path(config.output_dir) / config.name / TRUTH).read_text().splitlines()
    logits = {line["version"]: np.array(line["logits"]) for line in map(json.loads, lines)}
    ages: Counter[int] = Counter()
    for version, batch in enumerate(batches):
        for episode in (episode for group in batch for episode in group.group.episodes):
            for token, logprob, made_by, sampled in zip(
                episode.tokens, episode.logprobs, episode.versions, episode.sampled, strict=True
            ):
                if sampled:
                    table = logits[made_by] - np.log(np.exp(logits[made_by]).sum())
                    assert logprob == pytest.approx(table[token % SIZE], abs=1e-5)
                    ages[version - made_by] += 1
    assert min(ages) >= 0 and max(ages) <= max_age
    return ages


def test_at_age_zero_losses_match_the_synchronous_loop(tmp_path: Path, trained: Trained, monkeypatch: Any) -> None:
    """Both score every group once. The synchronous run is on Ray's engine, the other one eager, after equal SFT steps."""
    monkeypatch.setenv(ASKED, str(tmp_path / "asked"))
    cases = {"sync": ON_RAY, "async": {"grpo": {"async_grpo": {**ASYNC, "max_trajectory_age_steps": 0}}}}
    runs, taught = {}, []
    for name, sections in cases.items():
        config = configuration(tmp_path, name, sft={"max_num_steps": 2}, **sections)
        train(config)
        steps = steps_of(config)
        runs[name] = steps[2:]
        taught.append([(step["loss"], step.get("validation/loss")) for step in steps[:2]])
    assert taught[0] == taught[1] and taught[0][0] != taught[0][1]
    for sync, asynchronous in zip(*runs.values(), strict=True):
        assert [sync.get(name) for name in COMPARED] == [asynchronous.get(name) for name in COMPARED]
        assert asynchronous["staleness/policy_age_max"] == 0
        assert 0 < sync["timing_s/logprobs"] and 0 < sync["timing_s/reference_logprobs"]
    assert len(runs["sync"]) == STEPS
    assert runs["sync"][-1]["reward/mean"] != runs["sync"][0]["reward/mean"]
    assert numbers_of(trained) == 2 * list(range(STEPS * PROMPTS))
    asked = [json.loads(line)[0] for line in (tmp_path / "asked").read_text().splitlines()]
    groups = [prompts[0] for prompts in asked if len(prompts) == GENERATIONS]
    assert len(groups) == 2 * len(set(groups)) == 2 * STEPS * PROMPTS


COMPARED = (
    *("step", "loss", "policy/kl", "policy/entropy", "policy/clip_ratio"),
    *("reward/mean", "completion_tokens", "validation/reward"),
)


@pytest.mark.parametrize("in_flight", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in flight", "finish first"])
def test_ages_versions_and_numbers(tmp_path: Path, trained: Trained, monkeypatch: Any, in_flight: bool) -> None:
    """With Ray's engine."""
    finish_running = Experience.finish_running
    monkeypatch.setattr(Experience, "finish_running", lambda self: (time.sleep(0.05), finish_running(self)))
    settings = {**ASYNC, "in_flight_weight_updates": in_flight, "max_trajectory_age_steps": 2 if in_flight else 1}
    config = configuration(
        tmp_path,
        "ages",
        **ON_RAY,
        policy=TWO_ENGINES,
        # groups that wait are more than that many batches: without dynamic sampling, no reason to give up
        grpo={"async_grpo": settings, "max_num_steps": 8, "dynamic_sampling_max_gen_batches": 1},
        data={"task_args": {"train_s": 0.03, "engine_step_s": 0.015}},  # sequences outlast updates, also on a busy machine
        loss_fn={"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
    )
    train(config)
    ages = check_versions(config, trained, max_age=settings["max_trajectory_age_steps"])
    assert len(ages) > 1, "generation went on while training ran"
    assert sorted(numbers_of(trained)) == list(range(8 * PROMPTS)), "every group once"
    mixed = [len(set(episode.versions)) for batch in trained for group in batch for episode in group.group.episodes]
    assert (max(mixed) > 1) == in_flight, "updates in flight, and only they, leave several versions in one sequence"
    lines = steps_of(config)
    assert max(line["staleness/policy_age_max"] for line in lines) == max(ages)
    assert all(0 <= line[f"idle/{role}"] <= 1 for line in lines for role in ("train", "generation"))
    for line in lines[1:]:  # the refit before the first step counts in it
        assert line["timing_s/total"] > line["timing_s/update"] >= line["timing_s/refit"]
        if not in_flight:  # training waits while running sequences finish
            assert min(line["timing_s/exposed_generation"], line["timing_s/update"] - line["timing_s/refit"]) >= 0.05


@contextmanager
def stop_after(steps: int) -> Iterator[None]:
    """Interrupts the run in the block once `steps` steps are done and the next one is running."""
    work: Callable[..., None] = Experience.work
    requested: list[Experience] = []

    def watched(self: Experience, other: Any = None) -> None:
        if self.buffer.version >= steps and other is not None and not requested:
            requested.append(self)
            signal.raise_signal(signal.SIGINT)
        work(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experience, "work", watched)
        yield


def untrained_groups(config: Config) -> list[int]:
    """Returns the numbers of the groups that a run resumed from the newest checkpoint generates again."""
    directory = sorted((Path(config.output_dir) / config.name / "checkpoints").iterdir())[-1]
    saved = cast("list[tuple[int, int]]", read_state(directory).counters["grpo_untrained"])
    return [number for number, _ in saved]
