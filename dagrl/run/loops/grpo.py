"""The GRPO loop: generate, reward, log-probabilities, train, refit. Read it from top to bottom.

Algorithm: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, algorithm 1, with one policy update per batch of samples.

With ages above 0 (`grpo.async_grpo`), generation continues while the train workers learn: a second thread replays the
training phases, and the main thread replays quanta of generation, collects rewards, and submits refits. A refit runs between
two quanta, when the engines are at rest, so it needs no pause protocol: running requests continue from their KV cache
(`in_flight_weight_updates`), have it recomputed, or finish first. The number of groups that may start bounds the age of
samples (`dagrl.rl.rollout.trajectories`).

Sources: NeMo-RL's asynchronous GRPO (docs/guides/async-grpo.md); PipelineRL (Piche et al. 2025, arXiv:2509.19128) for
updates in flight, AReaL (Fu et al. 2025, arXiv:2505.24298) for ages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from dagrl.config import Json
from dagrl.config.roles import TRAIN
from dagrl.config.settings import algorithm_name
from dagrl.errors import WorkerError
from dagrl.refit import RefitReport
from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.rl.rollout.turns import open_turns
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.checkpoints import ranking_metric
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.policy_update import begin_update, calibrate_on_prompts
from dagrl.run.loops.sft import train_sft
from dagrl.run.resume import REFERENCE, saves_reference
from dagrl.run.session import Session
from dagrl.telemetry.metrics import EXPOSED, REFIT_BYTES, UPDATE, UPDATE_PAUSE


def train_samples(session: Session) -> None:
    """Runs what is left of the SFT stage, if there is one, and of GRPO."""
    if session.config.sft.max_num_steps:
        train_sft(session)
    with RewardRunner(session.config.reward) as reward:
        train_grpo(session, reward)


def train_grpo(session: Session, reward: RewardRunner) -> None:
    """Runs the GRPO steps that are left. Step numbers continue from the SFT steps."""
    settings, last = session.config.grpo.async_grpo, session.config.sft.max_num_steps + session.config.grpo.max_num_steps
    age = settings.max_trajectory_age_steps if settings.enabled else 0
    with open_experience(session, reward, age) as experience, training_thread() as thread:
        start_policy(session, experience)
        while session.step < last:
            step, metrics = session.step + 1, {EXPOSED: 0.0}
            with exposed(metrics):
                groups = experience.next_batch()
            if age:  # generation goes on
                training = thread.submit(train_on, session, groups, step)
                metrics |= experience.metrics(groups)
                experience.work_until(training)
                learned, ended = training.result()
                if not settings.in_flight_weight_updates:
                    with exposed(metrics):
                        experience.finish_running()
            else:  # engines are idle
                update = begin_update(session, groups, step)
                metrics |= experience.metrics(groups)
                prepare_next(session, experience)
                learned, ended = update.result()
                del update
            metrics |= learned | refit(session, experience, step)
            metrics[UPDATE] = time.perf_counter() - ended
            finish_step(session, experience, step, metrics)
            del groups  # now, while engines work: it takes a while to free so many tokens


def train_on(session: Session, groups: Sequence[ScoredGroup], step: int) -> tuple[dict[str, float], float]:
    """Trains the policy on a batch; see `begin_update`."""
    return begin_update(session, groups, step).result()


@contextmanager
def open_experience(session: Session, reward: RewardRunner, max_age_steps: int) -> Iterator[Experience]:
    """Opens the source of training batches. Checkpoints save its unfinished groups, and colocated engines give them back
    before they sleep."""
    config, inputs, replays = session.config, session.inputs, session.replays
    assert session.generation is not None
    with (
        open_turns(config, inputs.tokenizer) as turns,
        Experience(
            config,
            PromptData(inputs.prompts, inputs.validation_prompts, inputs.tokenizer),
            WorkerEngines(session.generation, replays, config.timeouts.replay, session.replacement),
            reward,
            turns,
            session.stop,
            version=session.step,
            max_age_steps=max_age_steps,
        ) as experience,
    ):
        session.checkpoints.parts.append(experience.save)
        if replays.shared is not None:
            replays.shared.before_sleep.append(experience.withdraw)
        yield experience


@contextmanager
def training_thread() -> Iterator[ThreadPoolExecutor]:
    """Opens a thread for the training phases. If the loop fails, the thread fails by itself at its next replay."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="train")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def start_policy(session: Session, experience: Experience) -> None:
    """Makes the current weights the reference policy and sends them to generation; a resumed run restores its state."""
    config, replays, checkpoints = session.config, session.replays, session.checkpoints
    first, total, progress = config.sft.max_num_steps, config.grpo.max_num_steps, session.recorder.progress
    resumed = checkpoints.resumed if "grpo_sampler" in checkpoints.state.counters else None
    if resumed is None:
        replays.hold("train", keep_generation_weights=True)
        if session.plan.reference == TRAIN:
            session.train.call("snapshot_reference", deadline=config.timeouts.replay)
        session.train.call("reset_optimizer", deadline=config.timeouts.replay)
        counters = {**checkpoints.state.counters, **_counters(session, experience)}
        checkpoints.state = replace(checkpoints.state, counters=counters)
    calibrate_on_prompts(config, replays, session.inputs.prompts)
    refit(session, experience, session.step)
    progress.step(session.step - first, total, {}, stage=algorithm_name(config))
    if session.step == first and config.grpo.val_at_start:
        progress.status("validating")
        session.record_initial_validation(algorithm_name(config), experience.validate(may_stop=resumed is None))
        _keep_untrained(session, experience, session.step)
    if resumed is not None:
        experience.restore(checkpoints.state.counters, resumed.directory)
    replays.close_step(tokens=0)  # none of this is part of the first step


def prepare_next(session: Session, experience: Experience) -> None:
    """Prepares the requests of the step after the current one, if they can wait, and nothing comes before that step.

    The batch that is being trained on counts as trained from then on.
    """
    version = session.step + 1
    if experience.can_prepare and not _validates(session, version) and session.goes_straight_on(version):
        experience.advance(version)
        experience.fill()


def refit(session: Session, experience: Experience, version: int) -> dict[str, float]:
    """Sends generation the train workers' weights as `version`, between two quanta. Returns how long generation stood still,
    and the bytes.

    Engines that run go on with the next quanta behind it, unless they exchange memory. Idle ones begin after it: their
    tokens must not be of an older version. Engines that fail in it are replaced, and it is replayed again.
    """
    replays = session.replays
    experience.connect()
    replay = replays.submit("refit", version)
    if experience.rollouts.running and (replays.shared is None or not replays.shared.moves):
        experience.rollouts.look_ahead()
    try:
        result = replays.collect("refit", replay, busy_s=mean_pause)[0]
    except WorkerError as error:
        experience.replace(error)
        return refit(session, experience, version)
    experience.rollouts.serve()
    experience.advance(version)
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


def finish_step(session: Session, experience: Experience, step: int, metrics: dict[str, float]) -> None:
    """Validates if it is due, starts the next groups unless something comes before them, and records the step."""
    config, stage = session.config, algorithm_name(session.config)
    if _validates(session, step):
        session.recorder.progress.status("validating")
        metrics |= experience.validate()
    _keep_untrained(session, experience, step)
    metrics |= session.replays.close_step(tokens=int(metrics["trained_tokens"]))
    state = TrainState(step, _counters(session, experience), ranking_metric(config, stage, metrics))
    if session.goes_straight_on(step):
        experience.begin()
    session.finish_step(stage, step - config.sft.max_num_steps, config.grpo.max_num_steps, metrics, state)


def _validates(session: Session, step: int) -> bool:
    """Whether `step` ends with a validation."""
    position, config = step - session.config.sft.max_num_steps, session.config.grpo
    return position == config.max_num_steps or bool(config.val_period and position % config.val_period == 0)


def _counters(session: Session, experience: Experience) -> dict[str, Json]:
    """The GRPO part of the driver's state in a checkpoint."""
    return {**experience.state(), REFERENCE: saves_reference(session.config, session.plan)}


def _keep_untrained(session: Session, experience: Experience, step: int) -> None:
    untrained, log = experience.take_untrained(), session.recorder.rollouts
    if log is not None:
        log.keep_untrained(untrained, step)


@contextmanager
def exposed(metrics: dict[str, float]) -> Iterator[None]:
    """Counts the time of the block as generation that training waits for."""
    start = time.perf_counter()
    yield
    metrics[EXPOSED] += time.perf_counter() - start
