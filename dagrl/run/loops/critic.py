"""The critic's part of a step: values, the advantages of tokens from them, and its own optimizer steps.

critic = CriticStep(..., batch)      # starts to compute values, while log-probabilities are computed
batch = critic.judged_batch()        # with an advantage for each token
critic.start(step)                   # optimizer steps, while the policy takes its own
metrics |= critic.finish(step)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.config import Config
from dagrl.config.roles import CRITIC, role_config
from dagrl.rl.advantages import Floats
from dagrl.rl.algorithm import Algorithm, token_advantages_of
from dagrl.rl.gae import explained_variance, rewards_at_end
from dagrl.run.loops.optimizer_step import collect_batch, submit_batch
from dagrl.run.replays import Replays
from dagrl.run.rollout_log import kept_columns
from dagrl.runtime.replay import Replay
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.metrics import COUNTS, KL, is_measured, join_optimizer_steps

VALUES, STEP = "critic_values", "critic_step"
PREFIX = "critic/"


class CriticStep:
    """The critic in one step on `batch`, whose `advantages` are the rewards of its rows until `judged_batch`."""

    def __init__(self, config: Config, algorithm: Algorithm, replays: Replays, train: WorkerGroup, batch: Batch) -> None:
        self._config, self._algorithm, self._replays, self._train = config, algorithm, replays, train
        self._batch = batch
        self._metrics: dict[str, float] = {}
        rows = Batch({name: batch[name] for name in ("tokens", "lengths")})
        self._values: Replay = replays.submit(VALUES, rows)
        self._steps: list[Replay] = []

    def judged_batch(self) -> Batch:
        """Waits for the values. Returns the batch with the algorithm's advantages in place of rewards."""
        batch = self._batch
        values = self._replays.collect(VALUES, self._values)[0]["values"] * batch["loss_mask"]
        rewards = self._token_rewards()
        advantages, returns = token_advantages_of(self._algorithm, rewards, values, batch["loss_mask"])
        inside = batch["loss_mask"] > 0
        self._metrics[PREFIX + "explained_variance"] = explained_variance(returns, values, inside)
        self._metrics[PREFIX + "return_mean"] = float(returns[inside].mean()) if inside.any() else 0.0
        names = ("tokens", "lengths", "loss_mask")
        learned = {"values": values.astype(np.float32), "returns": returns.astype(np.float32)}
        self._batch = Batch({**{name: batch[name] for name in names}, **learned})
        return batch.with_fields(advantages=advantages.astype(np.float32))

    def start(self, step: int) -> None:
        """Starts the critic's optimizer steps on the batch."""
        size = role_config(self._config, CRITIC).policy.train_global_batch_size
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

    def _token_rewards(self) -> Floats:
        """Returns [rows, tokens]: a row's reward at its last token, less each token's KL penalty with `ppo.kl_in_reward`."""
        config, batch, mask = self._config, self._batch, self._batch["loss_mask"]
        first = np.argmax(mask > 0, axis=1)
        rewards = rewards_at_end(batch["advantages"][np.arange(batch.rows), first], mask)
        if not config.ppo.kl_in_reward:
            return rewards
        kl = self._kl_penalty()
        self._metrics[KL] = float(kl[mask > 0].mean()) if mask.any() else 0.0
        penalized: Floats = rewards - config.loss_fn.reference_policy_kl_penalty * kl * mask
        return penalized

    def _kl_penalty(self) -> npt.NDArray[Any]:
        """Returns the KL estimate of each token [rows, tokens] from the log-probabilities that the train workers keep."""
        import torch

        from dagrl.rl.losses import kl_penalty
        from dagrl.rl.token_losses import TokenBatch

        kept = kept_columns(self._train, self._config.timeouts.replay)
        tables = {
            name: np.zeros(self._batch["loss_mask"].shape, np.float32) for name in ("prev_logprobs", "reference_logprobs")
        }
        for row, row_id in enumerate(self._batch["row_ids"].tolist()):
            length = int(self._batch["lengths"][row])
            for name, table in tables.items():
                table[row, :length] = kept[name][row_id][:length]
        columns = {name: torch.from_numpy(table) for name, table in tables.items()}
        mask = torch.from_numpy(self._batch["loss_mask"])
        tokens = TokenBatch(columns["prev_logprobs"], mask, columns, self._config.loss_fn)
        return kl_penalty(tokens).numpy()
