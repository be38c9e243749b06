"""What a step on generated samples consists of, for both loops: log-probabilities, optimizer steps, the refit, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from dagrl.config import Config, Json
from dagrl.config.roles import CRITIC
from dagrl.config.settings import algorithm_name, holds_reference, rows_per_sample, uses_critic
from dagrl.errors import WorkerError
from dagrl.refit import RefitReport
from dagrl.rl.agents.runner import open_environment
from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.batches import scored_batch
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import ranking_metric
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.calibration import calibrate, calibrate_on_prompts
from dagrl.run.loops.critic import CriticStep
from dagrl.run.loops.logprobs import ShardRows, compute_logprobs, split_minibatches
from dagrl.run.loops.optimizer_step import replay_batch
from dagrl.run.replays import Replays
from dagrl.run.resume import REFERENCE
from dagrl.run.session import Session
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import EXPOSED, MASKED_MINIBATCHES, REFIT_BYTES, UPDATE, UPDATE_PAUSE, join_optimizer_steps

logger = logging.getLogger(__name__)


@contextmanager
def open_experience(session: Session, reward: RewardRunner, *, max_age_steps: int) -> Iterator[Experience]:
    """Opens the source of training batches. Checkpoints save its unfinished groups, and colocated engines give them back
    before they sleep."""
    config, inputs, replays = session.config, session.inputs, session.replays
    assert session.generation is not None
    with (
        open_environment(config, inputs.tokenizer) as environment,
        Experience(
            config,
            PromptData(inputs.prompts, inputs.validation_prompts, inputs.tokenizer),
            WorkerEngines(session.generation, replays, config.timeouts.replay, session.replacement),
            reward,
            environment,
            session.stop,
            version=session.step,
            max_age_steps=max_age_steps,
        ) as experience,
    ):
        session.checkpoints.parts.append(experience.save)
        if replays.shared is not None:
            replays.shared.before_sleep.append(experience.withdraw)
        yield experience


def begin_step() -> dict[str, float]:
    """Returns the metrics of a step that has just begun."""
    return {EXPOSED: 0.0}


def start_policy(session: Session, experience: Experience) -> None:
    """Makes the current weights the reference policy and sends them to generation; a resumed run restores its state."""
    config, replays, checkpoints = session.config, session.replays, session.checkpoints
    first, total, progress = config.sft.max_num_steps, config.grpo.max_num_steps, session.recorder.progress
    resumed = checkpoints.resumed if "grpo_sampler" in checkpoints.state.counters else None
    if resumed is None:
        begin_policy(session)
        counters = {**checkpoints.state.counters, **_counters(config, experience)}
        checkpoints.state = replace(checkpoints.state, counters=counters)
    calibrate_on_prompts(config, replays, session.inputs.prompts)
    refit(replays, experience, session.step)
    progress.step(session.step - first, total, {}, stage=algorithm_name(config))
    if session.step == first and config.grpo.val_at_start:
        progress.status("validating")
        session.record_initial_validation(algorithm_name(config), experience.validate(may_stop=resumed is None))
        _keep_untrained(session, experience, session.step)
    if resumed is not None:
        experience.restore(checkpoints.state.counters, resumed.directory)
    replays.close_step(tokens=0)  # none of this is part of the first step


def begin_policy(session: Session) -> None:
    """Makes the current weights the reference policy, and starts the optimizer again."""
    deadline = session.config.timeouts.replay
    session.replays.hold("train", keep_generation_weights=True)
    if holds_reference(session.config):
        session.train.call("snapshot_reference", deadline=deadline)
    session.train.call("reset_optimizer", deadline=deadline)


def _counters(config: Config, experience: Experience) -> dict[str, Json]:
    """The GRPO part of the driver's state in a checkpoint."""
    saved = holds_reference(config) and config.policy.reference_model_name is None
    return {**experience.state(), REFERENCE: saved}


def learn(
    session: Session,
    groups: Sequence[ScoredGroup],
    step: int,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    known: bool = False,
) -> dict[str, float]:
    """Trains the train workers on one batch of groups. `meanwhile` is called while they train, unless nothing is trained on.

    `known`: they have the log-probabilities of all samples already.
    """
    config, replays = session.config, session.replays
    batch = scored_batch(config, groups, step)
    splits = split_minibatches(config, batch)
    judged = uses_critic(config)
    at_once = judged and not replays.takes_turns(CRITIC)  # otherwise its steps follow its values, without a turn in between
    critic = CriticStep(session, batch) if at_once else None
    if not known:
        compute_logprobs(config, replays, batch, splits, step)
    critic = CriticStep(session, batch) if judged and critic is None else critic
    batch = batch if critic is None else critic.judged_batch()
    session.stop.check()  # the last point at which the weights are those of the last finished step
    log = session.recorder.rollouts
    with log.keeping(groups, batch, step) if log is not None else nullcontext(lambda: None) as keep:
        if critic is not None:
            critic.start(step)
        metrics: dict[str, float] = {}
        warms_up = critic is not None and step - config.sft.max_num_steps <= config.critic.warmup_steps
        if not warms_up:
            metrics |= optimize(config, replays, batch, step, splits, lambda: (keep(), meanwhile()))
        if critic is not None:
            metrics |= critic.finish(step)
    return metrics | calibrate(config, replays, batch) | {"trained_tokens": float(batch["lengths"].sum())}


def prepare_next(session: Session, experience: Experience) -> None:
    """Prepares the requests of the step after the current one, unless something comes before it. Engines are idle.

    The batch that is being trained on counts as trained from then on. Can be called again.
    """
    version = session.step + 1
    if not _validates(session, version) and session.goes_straight_on(version):
        experience.advance(version)
        experience.fill()


def update(session: Session, experience: Experience, ended: float) -> dict[str, float]:
    """Sends generation the new weights between two quanta. Returns the time since training `ended`, and the pause."""
    version = session.step + 1
    running = experience.rollouts.running
    meanwhile = experience.rollouts.look_ahead if running else partial(prepare_next, session, experience)
    metrics = refit(session.replays, experience, version, meanwhile)
    metrics[UPDATE] = time.perf_counter() - ended
    experience.advance(version)
    return metrics


def refit(
    replays: Replays, experience: Experience, version: int, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Sends generation the train workers' weights as `version`. Returns how long generation stood still, and the bytes.

    Calls `meanwhile` while the weights go: it may submit quanta, so that engines continue at once. Engines that exchange
    memory have none for them until the refit has ended. Engines that fail in it are replaced, and it is replayed again.
    """
    experience.connect()
    replay = replays.submit("refit", version)
    if replays.shared is None or not replays.shared.moves:
        meanwhile()
    try:
        result = replays.collect("refit", replay, busy_s=mean_pause)[0]
    except WorkerError as error:
        experience.replace(error)
        return refit(replays, experience, version, meanwhile)
    experience.rollouts.serve()
    received = sum(report.bytes_received for report in _reports(result))
    return {UPDATE_PAUSE: max(_pauses(result)), REFIT_BYTES: float(received)} if received else {}


def mean_pause(result: object) -> float | None:
    """How long a refit took of each generation worker; its senders first wait for the quanta before it."""
    pauses = _pauses(result)
    return sum(pauses) / len(pauses) if pauses else None


def _pauses(result: object) -> list[float]:
    """Seconds that each generation worker stood still; the seconds of its receive if it does not report a pause."""
    return [report.pause_s or report.seconds for report in _reports(result) if report.bytes_received]


def _reports(result: object) -> Iterator[RefitReport]:
    """The reports in the result of a refit phase, in whatever nesting."""
    if isinstance(result, RefitReport):
        yield result
    elif isinstance(result, Iterable):
        for part in result:
            yield from _reports(part)


def _keep_untrained(session: Session, experience: Experience, step: int) -> None:
    untrained, log = experience.take_untrained(), session.recorder.rollouts
    if log is not None:
        log.keep_untrained(untrained, step)


def _validates(session: Session, step: int) -> bool:
    """Whether `step` ends with a validation."""
    position, config = step - session.config.sft.max_num_steps, session.config.grpo
    return position == config.max_num_steps or bool(config.val_period and position % config.val_period == 0)


def finish_step(session: Session, experience: Experience, metrics: dict[str, float]) -> None:
    """Validates if it is due, and records the step."""
    config, step = session.config, session.step + 1
    position, total = step - config.sft.max_num_steps, config.grpo.max_num_steps
    if _validates(session, step):
        session.recorder.progress.status("validating")
        metrics |= experience.validate()
    _keep_untrained(session, experience, step)
    metrics |= session.replays.close_step(tokens=int(metrics["trained_tokens"]))
    stage = algorithm_name(config)
    state = TrainState(step, _counters(config, experience), ranking_metric(config, stage, metrics))
    session.finish_step(stage, position, total, metrics, state, begin_next=experience.begin)


@contextmanager
def exposed(metrics: dict[str, float]) -> Iterator[None]:
    """Counts the time of the block as generation that training waits for."""
    start = time.perf_counter()
    yield
    metrics[EXPOSED] += time.perf_counter() - start


def optimize(
    config: Config,
    replays: Replays,
    batch: Batch,
    step: int,
    splits: Sequence[ShardRows] | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Takes one optimizer step for the rows of each `policy.train_global_batch_size` samples; returns the metrics of all.

    A minibatch without a token in the loss is skipped and counted; `grpo.overlong_filtering` can leave one. `splits` are the
    rows of each shard, by minibatch. `meanwhile` is called when each has begun.
    """
    rows = rows_per_sample(config)
    size = config.policy.train_global_batch_size * rows
    batch = batch.with_scalars(step=step)
    minibatches = [batch.share(number, batch.rows // size) for number in range(batch.rows // size)]
    unplaced: list[ShardRows | None] = [None] * len(minibatches)
    steps = [
        replay_batch(
            replays,
            "train_step",
            minibatch,
            step=step,
            shard_rows=shard_rows,
            least_sequences=minibatch.rows // rows if config.loss_fn.count_masked_sequences else 0,
            meanwhile=meanwhile,
        )
        for minibatch, shard_rows in zip(minibatches, splits or unplaced, strict=True)
        if minibatch["loss_mask"].any()
    ]
    masked = len(minibatches) - len(steps)
    if masked:
        logger.warning("%d of %d minibatches have no token in the loss: skipped", masked, len(minibatches))
    return {**(join_optimizer_steps(steps).flat() if steps else {}), MASKED_MINIBATCHES: float(masked)}
