"""Asynchronous GRPO with Megatron and vLLM: updates in flight, a stop with unfinished sequences, a resume, and an agent.

Every policy version is exported; the truth of each token's log-probability is transformers on the version next to it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.errors import StopRequestedError
from dagrl.rl.rollout.episodes import Episode
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.engines import ReplayedRefit, WorkerEngines
from dagrl.run.loops.policy_update import PolicyTrainer, PolicyUpdate
from dagrl.run.train import train
from dagrl.telemetry.rollouts import read_rollouts, rollout_files
from tests.integration.agent_task import NOTES
from tests.integration.main_job import GRPO, ROOT, steps_of
from tests.integration.test_async_grpo import numbers_of, stop_after, untrained_groups
from tests.integration.vllm_models import chosen, hf_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_cluster")]

STEPS, PROMPTS, AGE = 4, 4, 2
OVERRIDES = (
    "sft.max_num_steps=0",
    *(f"grpo.max_num_steps={STEPS}", f"grpo.num_prompts_per_step={PROMPTS}"),
    *("grpo.num_generations_per_prompt=2", "grpo.val_period=0", "grpo.val_at_start=false"),
    "grpo.async_grpo.enabled=true",
    *(f"policy.train_global_batch_size={2 * PROMPTS}", "policy.train_micro_batch_size=8"),
    *("policy.megatron_cfg.data_parallel_size=1", "policy.optimizer.lr=3e-3"),
    *("policy.max_total_sequence_length=56", "policy.generation.max_new_tokens=48"),
    "policy.generation.quantum_engine_steps=2",
    "policy.generation.forced_lengths={median: 24, sigma: 0.7}",
    "policy.generation.vllm_cfg.max_num_seqs=2",
    "data.task_args={digits: 2, carry: false, held_out: 8}",
    "reward.function=tests.integration.unigram_task:likes_sevens",
    *("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=2.0"),
    *("checkpointing.export_hf=false", "checkpointing.save_period=100"),
    *("logger.tensorboard_enabled=false", "logger.log_level=ERROR"),
)
CASES = {
    "kept": ("in_flight_weight_updates=true", f"max_trajectory_age_steps={AGE}"),
    "recomputed": (
        "in_flight_weight_updates=true",
        "recompute_kv_cache_after_weight_updates=true",
        f"max_trajectory_age_steps={AGE}",
    ),
    "finished": ("in_flight_weight_updates=false", "max_trajectory_age_steps=1"),
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[list[ScoredGroup]]]:
    """The batches trained on. Each version that generation receives is exported."""
    batches: list[list[ScoredGroup]] = []
    begin, update = PolicyTrainer.begin, WorkerEngines.update

    def watched(self: PolicyTrainer, groups: list[ScoredGroup], step: int) -> PolicyUpdate:
        batches.append(groups)
        return begin(self, groups, step)

    def exported(self: WorkerEngines, version: int) -> ReplayedRefit:
        self.replays.scheduler.groups["train"].call("export_hf", str(tmp_path / f"version{version}"))
        return update(self, version)

    monkeypatch.setattr(PolicyTrainer, "begin", watched)
    monkeypatch.setattr(WorkerEngines, "update", exported)
    yield batches


@pytest.fixture
def half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives generation one quantum during each step and each reward call, so that updates find unfinished sequences.

    A quick engine, or a slow start of the reward's process, would let everything finish under one version.
    """
    work = Experience.work

    def one_quantum(self: Experience, other: Future[Any] | None = None) -> None:
        work(self, other)
        wait([*([] if other is None else [other]), *(scoring.answers for scoring in self._scoring)])

    monkeypatch.setattr(Experience, "work", one_quantum)


def configuration(tmp_path: Path, case: str, *more: str) -> Config:
    settings = [f"grpo.async_grpo.{setting}" for setting in CASES[case]]
    overrides = [*OVERRIDES, *settings, f"output_dir={tmp_path}", "name=job", *more]
    return load_config(ROOT / GRPO, overrides)


@pytest.mark.usefixtures("half_way")
@pytest.mark.parametrize("case", CASES)
def test_stopped_half_way_and_resumed(tmp_path: Path, trained: list[list[ScoredGroup]], monkeypatch: Any, case: str) -> None:
    pytest.importorskip("vllm")
    config = configuration(tmp_path, case)
    with stop_after(steps=1), pytest.raises(StopRequestedError):
        train(config)
    before = len(steps_of(config))
    under_way = untrained_groups(config)
    assert 1 <= before < STEPS and under_way

    seen = len(trained)
    train(configuration(tmp_path, case, "checkpointing.resume=true"))
    assert [line["step"] for line in steps_of(config)] == list(range(1, STEPS + 1))
    done = trained[:before] + trained[seen:]
    assert sorted(numbers_of(done)) == list(range(STEPS * PROMPTS)), "every group once, over both processes"
    check_tokens(tmp_path, done, case)


def check_tokens(tmp_path: Path, batches: list[list[ScoredGroup]], case: str) -> None:
    """Checks ages, mixed versions, and the log-probability of each token."""
    ages: Counter[int] = Counter()
    mixed = 0
    for version, batch in enumerate(batches):
        for episode in (episode for group in batch for episode in group.group.episodes):
            ages.update(version - made for made in episode.versions)
            mixed += len(set(episode.versions)) > 1
            check_logprobs(tmp_path, episode, all_versions=case == "recomputed")
    assert 0 <= min(ages) and max(ages) <= AGE and len(ages) > 1
    assert (mixed > 0) == (case != "finished"), "updates in flight, and only they, leave several versions in one sequence"


def check_logprobs(tmp_path: Path, episode: Episode, *, all_versions: bool) -> None:
    """Compares the tokens of the first version; with recomputed KV caches, all tokens."""
    for version in sorted(set(episode.versions)) if all_versions else episode.versions[:1]:
        logprobs = hf_logprobs(tmp_path / f"version{version}", episode.prompt.tokens.tolist(), episode.tokens)
        expected = chosen(logprobs, episode.tokens)
        own = torch.tensor([made == version for made in episode.versions])
        assert (torch.tensor(episode.logprobs).double() - expected)[own].abs().max() < 1e-4


AGENT_STEPS, AGENT_AGE = 3, 1
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
AGENT = (
    *(f"grpo.max_num_steps={AGENT_STEPS}", "grpo.async_grpo.in_flight_weight_updates=true"),
    f"grpo.async_grpo.max_trajectory_age_steps={AGENT_AGE}",
    *("policy.generation.forced_lengths=null", "policy.generation.max_new_tokens=10"),
    "policy.generation.vllm_cfg.max_num_seqs=8",
    *("environment.agent=tests.integration.agent_task:adds_twice", "environment.max_conversations=2"),
    "reward={function: null, weights: {sevens: 1.0, asked: 0.5}}",
)


def test_trained_tokens_are_those_that_the_agent_got(
    tmp_path: Path, trained: list[list[ScoredGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("openai")
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    overrides = [
        *OVERRIDES,
        *AGENT,
        f"policy.tokenizer.chat_template={json.dumps(TEMPLATE)}",
        f"output_dir={tmp_path}",
        "name=agents",
    ]
    config = load_config(ROOT / GRPO, overrides)
    train(config)
    assert sorted(numbers_of(trained)) == list(range(AGENT_STEPS * PROMPTS))
    notes = {(note := json.loads(line))["seed"]: note["answers"] for line in (tmp_path / "notes").open()}
    seen = set[int]()
    for version, batch in enumerate(trained):
        for sample in (sample for group in batch for sample in group.samples):
            answers = notes[sample.completion.seed]
            longer, shorter = sample.rows
            check_row(longer, answers[:3])
            check_row(shorter, answers[3:])
            made = {made for row in sample.rows for made in row.versions}
            assert version - AGENT_AGE <= min(made) and max(made) <= version
            seen |= made
            assert sample.completion.reward_parts["sevens"] == sum(item["text"].count("7") for item in answers)
    assert len(seen) > 1, "weights changed while agents ran"
    for line, batch in zip(steps_of(config), trained, strict=True):
        assert line["reward/parts/asked"] == 1.0 and line["environment/failures"] == 0
        assert (line["environment/conversations"], line["environment/untrained_tokens"]) == (2.0, 0.0)
        rewards = [value for group in batch for value in group.rewards.values]
        expected = [0.5 + sample.completion.reward_parts["sevens"] for group in batch for sample in group.samples]
        assert rewards == expected
        for row in read_rollouts(rollout_files(Path(config.output_dir) / config.name / "rollouts")[line["step"]]):
            (shorter_row,) = row["conversations"]
            assert shorter_row["trained"] and len(shorter_row["train_logprobs"]) == len(shorter_row["tokens"])
            assert shorter_row["prompt"] == "2+2="
        learned = sum(sum(row.sampled) for group in batch for sample in group.samples for row in sample.rows)
        assert line["valid_tokens"] == learned


def check_row(row: Episode, answers: list[dict[str, Any]]) -> None:
    """Checks that the tokens in the loss are those of the answers, each in the context that it was given."""
    whole = [*row.prompt.tokens.tolist(), *row.tokens]
    sampled = [place for place, in_loss in enumerate(row.sampled) if in_loss]
    assert [row.tokens[place] for place in sampled] == [token for item in answers for token in item["tokens"]]
    assert [row.logprobs[place] for place in sampled] == [logprob for item in answers for logprob in item["logprobs"]]
    assert sorted({row.versions[place] for place in sampled}) == sorted({v for item in answers for v in item["versions"]})
    done = 0
    for item in answers:
        begin = len(row.prompt) + sampled[done]
        assert item["prompt"] == whole[:begin]
        done += len(item["tokens"])
