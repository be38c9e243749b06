"""Trains the policy on a batch of scored groups: log-probabilities, values of a critic, optimizer steps.

    update = begin_update(session, groups, step)     # returns with the optimizer steps in flight
    ...                                              # the driver prepares the next step
    metrics, ended = update.result()

The train workers keep log-probabilities for the step (`dagrl.workers.train.kept_logprobs`); the driver only says which rows
to compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TEACHER
from dagrl.config.settings import has_fp8_kv_cache, rows_per_sample, rows_together, samples_per_step
from dagrl.data.tokenization import Prompt
from dagrl.rl.algorithm import planned_algorithm
from dagrl.rl.rollout.batches import scored_batch
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.routed_experts import ROUTED_EXPERTS
from dagrl.run.loops.critic import CriticStep
from dagrl.run.loops.optimizer_step import ShardRows, collect_batch, submit_batch
from dagrl.run.plans import logprob_phases
from dagrl.run.replays import Replays
from dagrl.run.rollout_log import KeptSamples
from dagrl.run.session import Session
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from dagrl.telemetry.metrics import MASKED_MINIBATCHES, join_optimizer_steps

logger = logging.getLogger(__name__)


def begin_update(session: Session, groups: Sequence[ScoredGroup], step: int) -> PolicyUpdate:
    """Computes log-probabilities, and starts the optimizer steps of step `step` on `groups`."""
    config, plan, replays = session.config, session.plan, session.replays
    batch = scored_batch(planned_algorithm(plan), groups, step)
    splits = split_minibatches(config, batch)
    critic = None
    if plan.critic and not replays.takes_turns(CRITIC):
        critic = CriticStep(session, batch)  # computes values meanwhile
    compute_logprobs(config, plan, replays, batch, splits, step)
    if plan.critic and critic is None:
        critic = CriticStep(session, batch)  # its steps follow its values, without a turn in between
    if critic is not None:
        batch = critic.judged_batch()
    session.stop.check()  # the last point at which the weights are those of the last finished step
    if critic is not None:
        critic.start(step)
    warms_up = critic is not None and step - config.sft.max_num_steps <= config.critic.warmup_steps
    steps = None if warms_up else submit_steps(config, replays, batch, step, splits)
    log = session.recorder.rollouts
    return PolicyUpdate(session, batch, step, steps, critic, log.keep(groups, batch, step) if log is not None else None)


@dataclass(frozen=True)
class PolicyUpdate:
    """Optimizer steps in flight: one for each minibatch with a token in the loss; `steps` is None if the critic warms up."""

    session: Session
    batch: Batch
    step: int
    steps: Sequence[Replay | None] | None
    critic: CriticStep | None
    kept: KeptSamples | None  # in `rollouts/`

    def result(self) -> tuple[dict[str, float], float]:
        """Waits for the optimizer steps. Returns their metrics, and when they had ended (`time.perf_counter`)."""
        config, replays = self.session.config, self.session.replays
        metrics = {} if self.steps is None else collect_steps(replays, self.steps, self.step)
        if self.critic is not None:
            metrics |= self.critic.finish(self.step)
        if self.kept is not None:
            self.kept.write()
        metrics |= calibrate(config, replays, self.batch)
        return metrics | {"trained_tokens": float(self.batch["lengths"].sum())}, time.perf_counter()


def split_minibatches(config: Config, batch: Batch) -> list[ShardRows]:
    """Returns the rows of each minibatch that each train shard gets: the shard that computed their log-probabilities."""
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    lengths = batch["lengths"].astype(np.int64)
    together = rows_together(config, config.grpo.num_generations_per_prompt * rows_per_sample(config))
    shards = config.policy.megatron_cfg.layout.dp
    return [split_rows(lengths[start : start + size], shards, together) for start in range(0, batch.rows, size)]


def compute_logprobs(
    config: Config, plan: RunPlan, replays: Replays, batch: Batch, splits: Sequence[ShardRows], step: int
) -> None:
    """Computes the log-probabilities that step `step` needs of the rows of `batch`. `splits`: see `split_minibatches`.

    With `policy.offload_optimizer_for_logprob` the optimizer's state is on the host meanwhile.
    """
    rows, phases, teacher = logprob_batch(batch, step), logprob_phases(plan), None
    size = config.policy.train_global_batch_size * rows_per_sample(config)
    shards = [  # the rows of the whole batch that each has
        np.concatenate([number * size + rows for number, rows in enumerate(shard)]) for shard in zip(*splits, strict=True)
    ]
    offloads = config.policy.offload_optimizer_for_logprob and phases
    if offloads:
        replays.replay("logprob_inference_prep", step)
    if plan.reference == TEACHER:
        teacher = replays.submit("teacher_logprobs", Batch({name: rows[name] for name in ("tokens", "lengths")}))
    for name in phases:
        replays.replay(name, rows, rows=shards)
    if teacher is not None:
        found = replays.collect("teacher_logprobs", teacher)[0]  # through the driver to the train workers
        fields = {"lengths": rows["lengths"], "row_ids": rows["row_ids"], "reference_logprobs": found["logprobs"]}
        replays.replay("keep_reference_logprobs", Batch(fields, rows.scalars), rows=shards)
    if offloads:
        replays.replay("training_prep", step)


def logprob_batch(batch: Batch, step: int) -> Batch:
    """The fields of `batch` that the log-probability phases read."""
    fields = {name: batch[name] for name in ("tokens", "lengths", "row_ids", ROUTED_EXPERTS) if name in batch.fields}
    return Batch(fields, {"step": step})


def submit_steps(
    config: Config, replays: Replays, batch: Batch, step: int, splits: Sequence[ShardRows]
) -> list[Replay | None]:
    """Starts one optimizer step for the rows of each `policy.train_global_batch_size` samples.

    A minibatch without a token in the loss is None; `grpo.overlong_filtering` can leave one. `splits` are the rows of each
    shard, by minibatch.
    """
    rows = rows_per_sample(config)
    size = config.policy.train_global_batch_size * rows
    batch = batch.with_scalars(step=step)
    steps: list[Replay | None] = []
    for number, shard_rows in enumerate(splits):
        minibatch = batch.share(number, batch.rows // size)
        least = minibatch.rows // rows if config.loss_fn.count_masked_sequences else 0
        learns = minibatch["loss_mask"].any()
        steps.append(submit_batch(replays, "train_step", minibatch, shard_rows, least) if learns else None)
    return steps


def collect_steps(replays: Replays, steps: Sequence[Replay | None], step: int) -> dict[str, float]:
    """Waits for what `submit_steps` started; returns the metrics of all."""
    parts = [collect_batch(replays, "train_step", replay, step=step) for replay in steps if replay is not None]
    masked = len(steps) - len(parts)
    if masked:
        logger.warning("%d of %d minibatches have no token in the loss: skipped", masked, len(steps))
    return {**(join_optimizer_steps(parts).flat() if parts else {}), MASKED_MINIBATCHES: float(masked)}


def calibrate(config: Config, replays: Replays, batch: Batch) -> dict[str, float]:
    """Sets the scales of an FP8 KV cache (`vllm_cfg.kv_cache_dtype: fp8`) from the keys and values of `batch`.

    The next refit carries them to generation. Returns the largest of each as metrics.
    """
    if not has_fp8_kv_cache(config):
        return {}
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    shards: list[dict[str, float]] = replays.replay("calibrate_kv_scales", rows)
    return {f"kv_scale/{kind}": max(shard[kind] for shard in shards) for kind in shards[0]}


def calibrate_on_prompts(config: Config, replays: Replays, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Calibrates on the first prompts, as many as a step has samples, before the first refit: nothing is generated yet."""
    prompts = prompts[: samples_per_step(config)]
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt.tokens
    return calibrate(config, replays, Batch({"tokens": tokens, "lengths": np.array(list(map(len, prompts)), np.int64)}))
