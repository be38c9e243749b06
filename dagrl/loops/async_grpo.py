"""The asynchronous GRPO loop: generation goes on while the train workers learn. Read it from top to bottom.

One thread, the main one, replays quanta of generation, looks after rewards, and asks for refits; another replays the
training phases of one step at a time. A refit lies between two quanta, and engines come to rest for it by themselves, so it
needs no protocol: what runs goes on from the KV cache it has (`in_flight_weight_updates`), or has it recomputed, or has
finished before. How old samples may become is decided by how many groups may start (`dagrl.loops.trajectories`). While no
step is under way, the main thread also starts what can be done early for the next (`dagrl.loops.early`); the other thread
takes it.

Sources: NeMo-RL's asynchronous GRPO (docs/guides/async-grpo.md); PipelineRL (Piche et al. 2025, arXiv:2509.19128) for
updates in flight, AReaL (Fu et al. 2025, arXiv:2505.24298) for ages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

from dagrl.loops.early import EarlyWork
from dagrl.loops.experience import Experience
from dagrl.loops.grpo_step import Metrics, begin_step, exposed, finish_step, learn, start_policy, update
from dagrl.loops.scoring import ScoredGroup
from dagrl.loops.session import Session
from dagrl.rewards import RewardRunner


def train_async(session: Session, reward: RewardRunner) -> None:
    """All GRPO steps that are left, as `train_grpo`; with `max_trajectory_age_steps: 0` its losses exactly."""
    settings = session.config.grpo.async_grpo
    last = session.config.sft.max_num_steps + session.config.grpo.max_num_steps
    learning: Future[tuple[Metrics, float]] | None = None
    metrics = begin_step()
    with (
        Experience(session, reward, max_age_steps=settings.max_trajectory_age_steps) as experience,
        EarlyWork(session) as early,
        training_thread() as thread,
    ):
        start_policy(session, experience)
        while session.step < last:
            experience.fill()
            if learning is None:
                session.stop.check()
                if (groups := experience.take()) is not None:
                    metrics |= experience.metrics(groups)
                    learning = thread.submit(timed_learn, session, groups, session.step + 1, early)
            if learning is None or not learning.done():
                with exposed(metrics) if learning is None else nullcontext():
                    experience.work(learning)
                if learning is None:
                    early.advance(experience.next_batch())
                continue
            learned, ended = learning.result()
            learning, metrics = None, metrics | learned
            if not settings.in_flight_weight_updates:
                with exposed(metrics):
                    experience.finish_running()
            metrics |= update(session, experience, ended)
            finish_step(session, experience, metrics)
            metrics = begin_step()


def timed_learn(session: Session, groups: Sequence[ScoredGroup], step: int, early: EarlyWork) -> tuple[Metrics, float]:
    """`learn` with what was done early, and when it ended (`time.perf_counter`)."""
    return learn(session, groups, step, early.take()), time.perf_counter()


@contextmanager
def training_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread for the training phases; when the loop fails, it is left to fail by itself with the next replay."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="train")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
