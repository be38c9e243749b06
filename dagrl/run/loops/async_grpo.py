"""The asynchronous GRPO loop: generation continues while the train workers learn. Read it from top to bottom.

The main thread replays quanta of generation, collects rewards, and submits refits. A second thread replays the training
phases of one step at a time. A refit runs between two quanta, when the engines are at rest, so it needs no pause protocol:
running requests continue from their KV cache (`in_flight_weight_updates`), have it recomputed, or finish first. The number
of groups that may start bounds the age of samples (`dagrl.rl.rollout.trajectories`).

Sources: NeMo-RL's asynchronous GRPO (docs/guides/async-grpo.md); PipelineRL (Piche et al. 2025, arXiv:2509.19128) for
updates in flight, AReaL (Fu et al. 2025, arXiv:2505.24298) for ages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from dagrl.rl.rewards import RewardRunner
from dagrl.rl.rollout.scoring import ScoredGroup
from dagrl.run.loops.grpo_step import (
    begin_step,
    exposed,
    finish_step,
    learn,
    open_experience,
    start_policy,
    update,
)
from dagrl.run.session import Session


def train_async(session: Session, reward: RewardRunner) -> None:
    """Runs the GRPO steps that are left. With `max_trajectory_age_steps: 0` losses equal those of `train_grpo` exactly."""
    settings = session.config.grpo.async_grpo
    last = session.config.sft.max_num_steps + session.config.grpo.max_num_steps
    learning: Future[tuple[dict[str, float], float]] | None = None
    metrics = begin_step()
    with (
        open_experience(session, reward, max_age_steps=settings.max_trajectory_age_steps) as experience,
        training_thread() as thread,
    ):
        start_policy(session, experience)
        while session.step < last:
            experience.fill()
            if learning is None:
                session.stop.check()
                if (groups := experience.take()) is not None:
                    learning = thread.submit(timed_learn, session, groups, session.step + 1)
                    metrics |= experience.metrics(groups)
            if learning is None or not learning.done():
                with exposed(metrics) if learning is None else nullcontext():
                    experience.work(learning)
                continue
            learned, ended = learning.result()
            learning, metrics = None, metrics | learned
            if not settings.in_flight_weight_updates:
                with exposed(metrics):
                    experience.finish_running()
            metrics |= update(session, experience, ended)
            finish_step(session, experience, metrics)
            metrics = begin_step()


def timed_learn(session: Session, groups: Sequence[ScoredGroup], step: int) -> tuple[dict[str, float], float]:
    """Runs `learn`; returns its metrics and when it ended (`time.perf_counter`)."""
    return learn(session, groups, step), time.perf_counter()


@contextmanager
def training_thread() -> Iterator[ThreadPoolExecutor]:
    """Opens a thread for the training phases. If the loop fails, the thread fails by itself at its next replay."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="train")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
