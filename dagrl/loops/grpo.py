"""The synchronous GRPO loop: generate, reward, log-probabilities, train, refit. Read it from top to bottom.

Algorithm: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, algorithm 1, with one policy update a batch of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from dagrl.advantages import group_advantages
from dagrl.checkpoint import TrainState
from dagrl.config import Config, Json
from dagrl.data import Sampler
from dagrl.loops.rollout import Sample, rollout
from dagrl.loops.session import PhasePlan, Session, open_session
from dagrl.loops.sft import sft_plans, train_buckets, train_sft
from dagrl.loops.stop import StopRequestedError
from dagrl.metrics import VALIDATION
from dagrl.preflight import bucket_widths, generation_config
from dagrl.rewards import RewardRunner, Rewards, shuffled
from dagrl.shapes import Batch, Bucket

VALIDATION_STREAM = 1 << 32
"""Rollout streams of validations start here; those of training steps are the steps' numbers."""


def run_grpo(config: Config) -> None:
    """A short SFT phase if there is one, then GRPO, from start (or the newest checkpoint) to the final policy."""
    with open_session(config, grpo_plans(config)) as session, RewardRunner(config.reward) as reward:
        try:
            if config.sft.max_num_steps:
                train_sft(session)
            train_grpo(session, reward)
            session.finish()
        except StopRequestedError:
            session.save()
            raise
        finally:
            session.summarize()


def train_grpo(session: Session, reward: RewardRunner) -> None:
    """All GRPO steps that are left; they count on from the SFT steps."""
    config, first = session.config, session.config.sft.max_num_steps
    prompts, total = session.inputs.prompts, session.config.grpo.max_num_steps
    sampler = Sampler(len(prompts), config.data.seed, config.data.shuffle)
    start_policy(session, sampler)
    session.progress.step(session.step - first, total, {}, stage="grpo")
    if session.step == first and config.grpo.val_at_start:
        session.record.log(session.step, "grpo", validate(session, reward))
    while session.step < first + total:
        step = session.step + 1
        drawn = [prompts[index] for index in sampler.take(config.grpo.num_prompts_per_step)]
        samples = rollout(session, drawn, config.grpo.num_generations_per_prompt, stream=step)
        rewards = score(session, reward, samples)
        batch = train_batch(samples, advantages(config, rewards, step))
        batch, metrics = with_logprobs(session, batch)
        session.stop.check()  # the last point at which the weights are those of the last finished step
        metrics |= optimize(session, batch)
        session.replay("refit", step)
        metrics |= reward_metrics(rewards, samples)
        if step == first + total or (config.grpo.val_period and (step - first) % config.grpo.val_period == 0):
            metrics |= validate(session, reward)
        metrics |= session.lap(tokens=int(batch["lengths"].sum()))
        state = TrainState(
            step, policy_version=step, counters={"grpo_sampler": sampler.state()}, metric=session.metric(metrics)
        )
        session.finish_step("grpo", step - first, total, metrics, state)


def start_policy(session: Session, sampler: Sampler) -> None:
    """Make the current weights the reference policy and give them to generation; after a resume, take up its position."""
    if "grpo_sampler" in session.state.counters:
        sampler.restore(cast("Mapping[str, Json]", session.state.counters["grpo_sampler"]))
    else:
        session.train.call("snapshot_reference")
        session.train.call("reset_optimizer")
    session.replay("refit", session.step)


def score(session: Session, reward: RewardRunner, samples: Sequence[Sample]) -> Rewards:
    """The reward of each sample."""
    with session.clock.measure("reward"):
        return reward(
            [sample.prompt.text for sample in samples],
            [sample.text for sample in samples],
            [sample.prompt.reference for sample in samples],
        )


def advantages(config: Config, rewards: Rewards, step: int) -> npt.NDArray[np.float32]:
    """Advantage of each sample, [samples] float32."""
    values = shuffled(rewards.values, config.seed, step) if config.reward.shuffle else rewards.values
    groups = values.reshape(-1, config.grpo.num_generations_per_prompt)
    table = group_advantages(
        groups, leave_one_out=config.grpo.use_leave_one_out_baseline, normalize=config.grpo.normalize_rewards
    )
    return table.reshape(-1).astype(np.float32)


def train_batch(samples: Sequence[Sample], advantage: npt.NDArray[np.float32]) -> Batch:
    """Samples as rows, token aligned: the loss mask and the advantages are on the completions' tokens alone."""
    shape = (len(samples), max(len(sample) for sample in samples))
    tokens = np.zeros(shape, np.int64)
    mask, generation_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample)
        tokens[row, :start] = sample.prompt.tokens
        tokens[row, start:end] = sample.completion.tokens
        generation_logprobs[row, start:end] = sample.completion.logprobs
        mask[row, start:end] = 1.0
    return Batch(
        {
            "tokens": tokens,
            "lengths": np.array([len(sample) for sample in samples], np.int64),
            "loss_mask": mask,
            "advantages": mask * advantage[:, None],
            "generation_logprobs": generation_logprobs,
        }
    )


def with_logprobs(session: Session, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The batch with the policy's and the reference's log-probabilities, and the policy's mean entropy."""
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    policy: Batch = session.replay("logprobs", rows)
    mask = batch["loss_mask"]
    fields = {"prev_logprobs": policy["logprobs"] * mask, "reference_logprobs": np.zeros_like(policy["logprobs"])}
    if session.config.loss_fn.reference_policy_kl_penalty:
        reference: Batch = session.replay("reference_logprobs", rows)
        fields["reference_logprobs"] = reference["logprobs"] * mask
    entropy = float((policy["entropy"] * mask).sum() / mask.sum())
    return batch.with_fields(**fields), {"entropy": entropy}


def optimize(session: Session, batch: Batch) -> dict[str, float]:
    """One optimizer step for each `policy.train_global_batch_size` rows; metrics of the last, agreement of the whole."""
    size = session.config.policy.train_global_batch_size
    parts = [
        session.train_on("train_step", batch.select(range(start, start + size))) for start in range(0, batch.rows, size)
    ]
    return parts[-1]


def reward_metrics(rewards: Rewards, samples: Sequence[Sample]) -> dict[str, float]:
    """What the samples of a step were like."""
    lengths = [len(sample.completion.tokens) for sample in samples]
    return {
        "reward": float(rewards.values.mean()),
        "reward_failures": float(rewards.failed),
        "completion_tokens": float(np.mean(lengths)),
        "truncated_share": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
    }


def validate(session: Session, reward: RewardRunner) -> dict[str, float]:
    """Mean reward on held-out prompts, sampled as in training, one completion each."""
    prompts = session.inputs.validation_prompts
    if not prompts:
        return {}
    session.progress.status("validating")
    samples = rollout(session, prompts, 1, stream=VALIDATION_STREAM + session.step)
    return {VALIDATION + "reward": float(score(session, reward, samples).values.mean())}


def grpo_plans(config: Config) -> list[PhasePlan]:
    """The phases of GRPO (and of its SFT phase), at the shapes they will meet."""
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    steps = train_buckets(config, config.policy.train_global_batch_size)
    scored = train_buckets(config, samples)
    generation = generation_config(config)
    requests = math.ceil(max(samples, config.grpo.max_val_samples) / generation.vllm_cfg.layout.dp)
    widest = bucket_widths(config.policy)[-1]
    answers = requests * (generation.max_new_tokens * 3 * 8 + 256) + (1 << 16)  # ids, log-probabilities, versions
    plans = [
        PhasePlan("train_step", steps),
        PhasePlan("logprobs", scored, result_bytes=_rows_bytes(scored)),
        PhasePlan("reference_logprobs", scored, result_bytes=_rows_bytes(scored)),
        PhasePlan("generate", (Bucket(1, 1), Bucket(requests, widest)), result_bytes=answers),
        PhasePlan("refit"),
    ]
    if not config.loss_fn.reference_policy_kl_penalty:
        plans = [plan for plan in plans if plan.name != "reference_logprobs"]
    return [*sft_plans(config), *plans] if config.sft.max_num_steps else plans


def _rows_bytes(buckets: Sequence[Bucket]) -> int:
    """Room for log-probabilities and entropy of the largest bucket."""
    return max(bucket.sequences * (bucket.tokens * 8 + 8) for bucket in buckets) + (1 << 16)
