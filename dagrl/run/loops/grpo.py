"""The GRPO loop: generate, reward, log-probabilities, train, refit. Read it from top to bottom.

Algorithm: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, algorithm 1, with one policy update per batch of samples.

With ages above 0 (`grpo.async_grpo`), generation continues while the train workers learn: a second thread replays the
training phases, and the main thread replays quanta of generation, collects rewards, and submits refits. A refit runs between
two quanta, when the engines are at rest, so it needs no pause protocol: running requests continue from their KV cache
(`in_flight_weight_updates`), have it recomputed, or finish first. The number of groups that may start bounds the age of
samples (`dagrl.rl.rollout.experience`).

Sources: NeMo-RL's asynchronous GRPO (docs/guides/async-grpo.md); PipelineRL (Piche et al. 2025, arXiv:2509.19128) for
updates in flight, AReaL (Fu et al. 2025, arXiv:2505.24298) for ages.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

from dagrl.config.settings import algorithm_name
from dagrl.errors import WorkerError
from dagrl.refit import RefitReport
from dagrl.rl.benchmarks import rewards_of_sets
from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.turns import open_turns
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.policy_update import Learned, PolicyTrainer, PolicyUpdate, open_trainer
from dagrl.run.loops.sft import train_sft
from dagrl.run.replays import Replays
from dagrl.run.session import Session, Stage
from dagrl.telemetry.metrics import EXPOSED, REFIT_BYTES, UPDATE, UPDATE_PAUSE


def train_samples(session: Session) -> None:
    """Runs what is left of the SFT stage, if there is one, and of GRPO."""
    config = session.config
    if config.sft.max_num_steps:
        train_sft(session)
    stage = Stage.of(algorithm_name(config), config.grpo, after=config.sft.max_num_steps)
    with (
        RewardRunner(config.reward) as reward,
        open_experience(session, reward) as experience,
        open_trainer(session) as trainer,
    ):
        train_grpo(session, stage, experience, trainer)


def train_grpo(session: Session, stage: Stage, experience: Experience, trainer: PolicyTrainer) -> None:
    """Runs the GRPO steps that are left."""
    ahead, replays = session.config.grpo.async_grpo, session.replays
    update: PolicyUpdate | Future[Learned]
    start_policy(session, stage, experience, trainer)
    while session.step < stage.last:
        step, metrics = session.step + 1, {EXPOSED: 0.0}
        with exposed(metrics):
            groups = experience.next_batch()
        if ahead.max_age_steps:  # generation goes on
            update = trainer.submit(groups, step)
            metrics |= experience.metrics(groups)
            experience.work_until(update)
        else:  # engines are idle
            update = trainer.begin(groups, step)
            metrics |= experience.metrics(groups)
            if session.goes_straight_on(step) and not stage.validates(step) and not evaluates(session, stage, step):
                experience.prepare(step)
        learned, ended = update.result()
        if ahead.max_age_steps and not ahead.in_flight_weight_updates:
            with exposed(metrics):
                experience.finish_running()
        metrics |= learned | refit(replays, experience, step)
        metrics[UPDATE] = time.perf_counter() - ended
        if stage.validates(step):
            session.recorder.progress.status("validating")
            metrics |= experience.validate()
        if evaluates(session, stage, step):
            session.recorder.progress.status("evaluating")
            metrics |= experience.evaluate()
        session.recorder.keep_untrained(experience.take_untrained(), step)
        metrics |= replays.close_step(tokens=int(metrics["trained_tokens"]))
        counters = experience.state() | session.reference_counter
        if session.goes_straight_on(step):
            experience.begin()
        session.finish_step(stage, step, metrics, counters)
        del groups, update  # now, while engines work: it takes a while to free so many tokens


def start_policy(session: Session, stage: Stage, experience: Experience, trainer: PolicyTrainer) -> None:
    """Makes the current weights the reference policy and sends them to generation; a resumed run restores its state."""
    resumed = session.checkpoints.resumed_in("grpo_sampler")
    if resumed is None:
        trainer.start()
        session.checkpoints.add_counters(experience.state() | session.reference_counter)
    refit(session.replays, experience, session.step)
    session.begin(stage)
    if session.step == stage.after and stage.val_at_start:
        session.recorder.progress.status("validating")
        metrics = experience.validate(may_stop=resumed is None) | experience.evaluate(may_stop=resumed is None)
        session.record_initial_validation(stage, metrics)
        session.recorder.keep_untrained(experience.take_untrained(), session.step)
    if resumed is not None:
        experience.restore(resumed.state.counters)
    session.replays.close_step(tokens=0)  # none of this is part of the first step


def evaluates(session: Session, stage: Stage, step: int) -> bool:
    """Returns whether `step` ends with an evaluation on standard sets."""
    evaluation = session.config.evaluation
    due = step == stage.last or bool(evaluation.period and (step - stage.after) % evaluation.period == 0)
    return due and bool(evaluation.sets)


@contextmanager
def open_experience(session: Session, reward: RewardRunner) -> Iterator[Experience]:
    """Opens the source of training batches. Colocated engines give unfinished groups back before they sleep."""
    config, inputs, replays = session.config, session.inputs, session.replays
    assert session.generation is not None
    sets = config.evaluation.sets
    with (
        open_turns(config, inputs.tokenizer, inputs.processor) as turns,
        RewardRunner(rewards_of_sets(config.evaluation, config.reward.num_workers)) if sets else nullcontext() as marks,
    ):
        experience = Experience(
            config,
            PromptData(
                inputs.prompts,
                inputs.validation_prompts,
                inputs.tokenizer,
                inputs.evaluation_prompts,
                config.data.images.enabled,
            ),
            WorkerEngines(session.generation, replays, config.timeouts.replay, session.replacement),
            reward,
            turns,
            session.stop,
            version=session.step,
            marks=marks,
            measure=replays.clock.measure,
        )
        if replays.shared is not None:
            replays.shared.before_sleep.append(experience.withdraw)
        yield experience


def refit(replays: Replays, experience: Experience, version: int) -> dict[str, float]:
    """Sends generation the train workers' weights as `version`, between two quanta. Returns generation's
    pause and the bytes received.

    Engines that run go on with the next quanta behind it, unless they exchange memory. Idle ones begin after it: their
    tokens must not be of an older version. Engines that fail in it are replaced, and it is replayed again.
    """
    experience.connect()
    replay = replays.submit("refit", version)
    if experience.rollouts.running and (replays.shared is None or not replays.shared.moves):
        experience.rollouts.look_ahead()
    try:
        result = replays.collect("refit", replay, busy_s=mean_pause)[0]
    except WorkerError as error:
        experience.replace(error)
        return refit(replays, experience, version)
    experience.rollouts.serve()
    experience.advance(version)
    received = sum(report.bytes_received for report in _reports(result))
    return {UPDATE_PAUSE: max(_pauses(result)), REFIT_BYTES: float(received)} if received else {}


def mean_pause(result: object) -> float | None:
    """Returns the mean pause of the generation workers in seconds. Their senders also wait for the quanta before it."""
    pauses = _pauses(result)
    return sum(pauses) / len(pauses) if pauses else None


def _pauses(result: object) -> list[float]:
    """Returns each generation worker's pause in seconds, or the time of its receive if it reports none."""
    return [report.pause_s or report.seconds for report in _reports(result) if report.bytes_received]


def _reports(result: object) -> Iterator[RefitReport]:
    """Yields the reports in the result of a refit phase, in whatever nesting."""
    if isinstance(result, RefitReport):
        yield result
    elif isinstance(result, Iterable):
        for part in result:
            yield from _reports(part)


@contextmanager
def exposed(metrics: dict[str, float]) -> Iterator[None]:
    """Counts the time of the block as generation that training waits for."""
    start = time.perf_counter()
    yield
    metrics[EXPOSED] += time.perf_counter() - start
