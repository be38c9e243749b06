"""The SFT loop: draw demonstrations, replay one optimizer step, evaluate now and then. Read it from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from dagrl.checkpoint import TrainState
from dagrl.config import Config, Json
from dagrl.config.settings import bucket_widths
from dagrl.data import Sampler
from dagrl.data.tokenization import Demonstration, collate, digest_of
from dagrl.loops.session import Session
from dagrl.loops.start import PhasePlan, run_session
from dagrl.shapes import Bucket
from dagrl.telemetry.metrics import VALIDATION


def run_sft(config: Config) -> None:
    """Supervised fine-tuning as `config` says, from start (or the newest checkpoint) to the final policy."""
    with run_session(config, sft_plans(config)) as session:
        train_sft(session)


def train_sft(session: Session) -> None:
    """All SFT steps that are left; steps 1 to `sft.max_num_steps` of the run."""
    config = session.config
    train, validation = session.inputs.demonstrations, session.inputs.validation_demonstrations
    sampler = Sampler(len(train), config.data.seed, config.data.shuffle, digest_of(train))
    if "sft_sampler" in session.state.counters:
        sampler.restore(cast("Mapping[str, Json]", session.state.counters["sft_sampler"]))
    total = config.sft.max_num_steps
    session.progress.step(min(session.step, total), total, {}, stage="sft")
    if session.step == 0 and config.sft.val_at_start and validation:
        session.validated_at_start("sft", evaluate(session, validation, may_stop=True))
        session.lap(tokens=0)  # it is not of the first step
    while session.step < total:
        step = session.step + 1
        batch = collate([train[index] for index in sampler.take(config.policy.train_global_batch_size)])
        metrics = session.train_on("sft_step", batch.with_scalars(**learning_rate(config)))
        if validation and (step == total or (config.sft.val_period and step % config.sft.val_period == 0)):
            metrics |= evaluate(session, validation)
        metrics |= session.lap(tokens=int(batch["lengths"].sum()))
        state = TrainState(step, counters={"sft_sampler": sampler.state()}, metric=session.metric("sft", metrics))
        session.finish_step("sft", step, total, metrics, state)


def evaluate(session: Session, validation: list[Demonstration], *, may_stop: bool = False) -> dict[str, float]:
    """Mean negative log-likelihood of the held-out demonstrations' response tokens.

    `may_stop`: a stop ends it, as it may where every step that was taken is recorded.
    """
    session.progress.status("validating")
    size = session.config.policy.train_global_batch_size
    loss = tokens = 0.0
    for start in range(0, len(validation), size):
        if may_stop:
            session.stop.check()
        batch = collate(validation[start : start + size])
        part = session.train_on("evaluate", batch)
        loss += part["loss"] * part["valid_tokens"]
        tokens += part["valid_tokens"]
    return {VALIDATION + "loss": loss / tokens}


def learning_rate(config: Config) -> dict[str, float]:
    """The SFT learning rate, where it is not the schedule's, which before GRPO is as long as GRPO."""
    if config.sft.lr is not None:
        return {"lr": config.sft.lr}
    return {} if config.algorithm == "sft" else {"lr": config.policy.megatron_cfg.optimizer.lr}


def sft_plans(config: Config) -> list[PhasePlan]:
    """The phases of SFT, at every width of `policy.sequence_buckets`."""
    buckets = train_buckets(config, config.policy.train_global_batch_size)
    return [PhasePlan("sft_step", buckets), PhasePlan("evaluate", buckets)]


def train_buckets(config: Config, rows: int) -> tuple[Bucket, ...]:
    """Buckets of one train shard for `rows` rows over all of them; workers cut microbatches of equal size from any."""
    per_shard = math.ceil(rows / config.policy.megatron_cfg.layout.dp)
    return tuple(Bucket(per_shard, width) for width in bucket_widths(config.policy))
