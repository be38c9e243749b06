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

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext

from dagrl.config.settings import algorithm_name, burst_steps
from dagrl.rl.benchmarks import rewards_of_sets
from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.engines import PromptData
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.turns import open_turns
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.engines import WorkerEngines
from dagrl.run.loops.policy_update import PolicyTrainer, open_trainer
from dagrl.run.loops.sft import train_sft
from dagrl.run.session import Session, Stage
from dagrl.telemetry.metrics import EXPOSED, UPDATE


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
    ahead = session.config.grpo.async_grpo
    start_policy(session, stage, experience, trainer)
    while session.step < stage.last:
        step, metrics = session.step + 1, {EXPOSED: 0.0}
        with exposed(metrics):
            groups = experience.next_batch()
        update = trainer.submit(groups, step) if ahead.max_age_steps else trainer.begin(groups, step)
        metrics |= experience.metrics(groups)
        if isinstance(update, Future):  # generation goes on
            experience.work_until(update)
        elif session.goes_straight_on(step) and not stage.validates(step) and not evaluates(session, stage, step):
            experience.prepare(step)  # engines are idle
        learned, ended = update.result()
        if ahead.max_age_steps and not ahead.in_flight_weight_updates:
            with exposed(metrics):
                experience.finish_running()
        metrics |= learned | experience.refit(step)
        metrics[UPDATE] = time.perf_counter() - ended
        if stage.validates(step):
            session.recorder.progress.status("validating")
            metrics |= experience.validate()
        if evaluates(session, stage, step):
            session.recorder.progress.status("evaluating")
            metrics |= experience.evaluate()
        session.recorder.keep_untrained(experience.take_untrained(), step)
        metrics |= session.replays.close_step(tokens=int(metrics["trained_tokens"]))
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
    experience.refit(session.step)
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
        bursts = burst_steps(config, gpus=gpus_per_worker(config.cluster) > 0)
        experience = Experience(
            config,
            PromptData(
                inputs.prompts,
                inputs.validation_prompts,
                inputs.tokenizer,
                inputs.evaluation_prompts,
                config.data.images.enabled,
            ),
            WorkerEngines(session.generation, replays, config.timeouts.replay, session.replacement, bursts),
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


@contextmanager
def exposed(metrics: dict[str, float]) -> Iterator[None]:
    """Counts the time of the block as generation that training waits for."""
    start = time.perf_counter()
    yield
    metrics[EXPOSED] += time.perf_counter() - start
