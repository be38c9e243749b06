"""The synchronous GRPO loop: generate, reward, log-probabilities, train, refit. Read it from top to bottom.

Algorithm: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, algorithm 1, with one policy update a batch of samples. The
asynchronous loop, `dagrl.loops.async_grpo`, takes the same steps side by side.
"""

from __future__ import annotations

import time

from dagrl.config import Config
from dagrl.loops.async_grpo import train_async
from dagrl.loops.early import EarlyWork
from dagrl.loops.experience import Experience
from dagrl.loops.grpo_step import begin_step, exposed, finish_step, grpo_plans, learn, start_policy, update
from dagrl.loops.scoring import ScoredGroup
from dagrl.loops.session import Session
from dagrl.loops.sft import train_sft
from dagrl.loops.start import run_session
from dagrl.rewards import RewardRunner


def run_grpo(config: Config) -> None:
    """A short SFT phase if there is one, then GRPO, from start (or the newest checkpoint) to the final policy."""
    with run_session(config, grpo_plans(config)) as session:
        if config.sft.max_num_steps:
            train_sft(session)
        train = train_async if config.grpo.async_grpo.enabled else train_grpo
        with RewardRunner(config.reward) as reward:
            train(session, reward)


def train_grpo(session: Session, reward: RewardRunner) -> None:
    """All GRPO steps that are left; they count on from the SFT steps."""
    last = session.config.sft.max_num_steps + session.config.grpo.max_num_steps
    with Experience(session, reward, max_age_steps=0) as experience, EarlyWork(session) as early:
        start_policy(session, experience)
        while session.step < last:
            step, metrics = session.step + 1, begin_step()
            with exposed(metrics):
                groups = generate_batch(session, experience, early)
            metrics |= experience.metrics(groups)
            metrics |= learn(session, groups, step, early.take())
            metrics |= update(session, experience, time.perf_counter())
            finish_step(session, experience, metrics)


def generate_batch(session: Session, experience: Experience, early: EarlyWork) -> list[ScoredGroup]:
    """Prompts are drawn, completed and scored until there is a whole batch; some of its training may be done by then."""
    while (groups := experience.take()) is None:
        experience.fill()
        experience.work()
        early.advance(experience.next_batch())
        session.stop.check()
    return groups
