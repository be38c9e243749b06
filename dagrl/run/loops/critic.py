"""The critic's part of a step: values, the advantages of tokens from them, and its own optimizer steps.

critic = CriticStep(..., batch)      # starts to compute values, while log-probabilities are computed
batch = critic.judged_batch()        # with an advantage for each token
critic.start(step)                   # optimizer steps, while the policy takes its own
metrics |= critic.finish(step)
"""

from __future__ import annotations

import numpy as np

from dagrl.config import Config
from dagrl.rl.advantages import explained_variance, rewards_at_end
from dagrl.rl.algorithm import Algorithm, token_advantages_of
from dagrl.run.loops.optimizer_step import collect_batch, submit_batch
from dagrl.run.replays import Replays
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import COUNTS, is_measured, join_optimizer_steps

VALUES, STEP = "critic_values", "critic_step"
PREFIX = "critic/"


class CriticStep:
    """The critic in one step on `batch`, whose `advantages` are the rewards of its rows until `judged_batch`."""

    def __init__(self, config: Config, algorithm: Algorithm, replays: Replays, batch: Batch) -> None:
        self._config, self._algorithm, self._replays, self._batch = config, algorithm, replays, batch
        self._metrics: dict[str, float] = {}
        rows = Batch({name: batch[name] for name in ("tokens", "lengths")})
        self._values: Replay = replays.submit(VALUES, rows)
        self._steps: list[Replay] = []

    def judged_batch(self) -> Batch:
        """Waits for the values. Returns the batch with the algorithm's advantages in place of rewards."""
        batch = self._batch
        values = self._replays.collect(VALUES, self._values)[0]["values"] * batch["loss_mask"]
        inside = batch["loss_mask"] > 0
        rewards = batch["advantages"][np.arange(batch.rows), inside.argmax(axis=1)]  # on every token of a row
        rewards = rewards_at_end(rewards, inside)
        advantages, returns = token_advantages_of(self._algorithm, rewards, values, batch["loss_mask"])
        self._metrics[PREFIX + "explained_variance"] = explained_variance(returns, values, inside)
        self._metrics[PREFIX + "return_mean"] = float(returns[inside].mean()) if inside.any() else 0.0
        names = ("tokens", "lengths", "loss_mask")
        learned = {"values": values.astype(np.float32), "returns": returns.astype(np.float32)}
        self._batch = Batch({**{name: batch[name] for name in names}, **learned})
        return batch.with_fields(advantages=advantages.astype(np.float32))

    def start(self, step: int) -> None:
        """Starts the critic's optimizer steps on the batch."""
        size = self._config.policy.train_global_batch_size
        for start in range(0, self._batch.rows, size):
            minibatch = self._batch.select(range(start, start + size)).with_scalars(step=step)
            if minibatch["loss_mask"].any():
                self._steps.append(submit_batch(self._replays, STEP, minibatch))

    def finish(self, step: int) -> dict[str, float]:
        """Waits for the optimizer steps, and returns the critic's metrics."""
        parts = [collect_batch(self._replays, STEP, replay, step=step) for replay in self._steps]
        metrics = join_optimizer_steps(parts).flat() if parts else {}
        renamed = {PREFIX + name: value for name, value in metrics.items() if name not in COUNTS and not is_measured(name)}
        return renamed | self._metrics
