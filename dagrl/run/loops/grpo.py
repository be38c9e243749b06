"""The synchronous GRPO loop: generate, reward, log-probabilities, train, refit. Read it from top to bottom.

Algorithm: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, algorithm 1, with one policy update per batch of samples. The
asynchronous loop, `dagrl.run.loops.async_grpo`, overlaps the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.experience import Experience
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops.async_grpo import train_async
from dagrl.run.loops.grpo_step import (
    begin_step,
    exposed,
    finish_step,
    learn,
    open_experience,
    prepare_next,
    start_policy,
    update,
)
from dagrl.run.loops.sft import train_sft
from dagrl.run.session import Session


def train_samples(session: Session) -> None:
    """Runs what is left of the SFT stage, if there is one, and of GRPO."""
    config = session.config
    if config.sft.max_num_steps:
        train_sft(session)
    loop = train_async if config.grpo.async_grpo.enabled else train_grpo
    with RewardRunner(config.reward) as reward:
        loop(session, reward)


def train_grpo(session: Session, reward: RewardRunner) -> None:
    """Runs the GRPO steps that are left. Step numbers continue from the SFT steps."""
    last = session.config.sft.max_num_steps + session.config.grpo.max_num_steps
    with open_experience(session, reward, max_age_steps=0) as experience:
        start_policy(session, experience)
        while session.step < last:
            step, metrics = session.step + 1, begin_step()
            with exposed(metrics):
                groups = generate_batch(session, experience)
            summary = cache(partial(experience.metrics, groups))
            metrics |= learn(session, groups, step, partial(use_training_time, session, experience, summary))
            metrics |= summary()
            metrics |= update(session, experience, time.perf_counter())
            finish_step(session, experience, metrics)
            del groups, summary  # now, while engines work: it takes a while to free so many tokens


def generate_batch(session: Session, experience: Experience) -> list[ScoredGroup]:
    """Draws, completes and scores prompts until a batch is complete."""
    while (groups := experience.take()) is None:
        experience.fill()
        experience.work()
        session.stop.check()
    return groups


def use_training_time(session: Session, experience: Experience, summary: Callable[[], object]) -> None:
    """Calls `summary`, which counts the ages of samples in the current step, and prepares the next step's requests.

    Agents begin with their groups, and would wait for the whole training step.
    """
    summary()
    if session.config.environment.agent is None and not experience.rollouts.running:
        prepare_next(session, experience)
