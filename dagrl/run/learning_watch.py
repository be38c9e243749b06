"""Warns of a run that does not learn, or no longer does: rewards without contrast, entropy or KL that runs away.

Each warning is logged once per run and names the keys to look at.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

from dagrl.telemetry.metrics import ENTROPY, EQUAL_GROUPS, KL

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Steps in a row after which a state counts as lasting."""

ENTROPY_COLLAPSE, ENTROPY_GROWTH = 0.05, 2.0
"""Entropy below, or above, this multiple of its first value runs away."""

KL_LIMIT = 1.0
"""Nats per token from the reference policy; runs that learn stay well below 0.2."""


class LearningWatch:
    """Looks at the metrics of each step."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, float]] = deque(maxlen=PATIENCE)
        self._first_entropy: float | None = None
        self._warned: set[str] = set()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Logs what has lasted for `PATIENCE` steps."""
        self._recent.append(metrics)
        self._first_entropy = self._first_entropy or metrics.get(ENTROPY)
        if len(self._recent) < PATIENCE:
            return
        if self._all(EQUAL_GROUPS, lambda share: share == 1.0):
            self._warn(
                "rewards",
                "the rewards of every group have been equal for %d steps, so there is nothing to learn from. Check "
                "reward.function and policy.generation.max_new_tokens, or use easier prompts, a higher "
                "policy.generation.temperature or more grpo.num_generations_per_prompt",
                PATIENCE,
            )
        self._check_entropy()
        if self._all(KL, lambda divergence: divergence > KL_LIMIT):
            self._warn(
                "kl",
                "the policy's KL divergence from the reference is %.3g nats per token. Lower "
                "policy.megatron_cfg.optimizer.lr, or raise loss_fn.reference_policy_kl_penalty",
                metrics[KL],
            )

    def _check_entropy(self) -> None:
        first = self._first_entropy
        if not first:
            return
        latest = self._recent[-1].get(ENTROPY, first)
        if self._all(ENTROPY, lambda entropy: entropy < ENTROPY_COLLAPSE * first):
            self._warn(
                "collapse",
                "the policy's entropy fell from %.3g to %.3g nats per token: samples of a group become equal. Raise "
                "loss_fn.ratio_clip_max or policy.generation.temperature, or lower policy.megatron_cfg.optimizer.lr",
                first,
                latest,
            )
        if self._all(ENTROPY, lambda entropy: entropy > ENTROPY_GROWTH * first):
            self._warn(
                "growth",
                "the policy's entropy grew from %.3g to %.3g nats per token: it becomes random. Lower "
                "policy.megatron_cfg.optimizer.lr, and check gen_kl_error and the rewards",
                first,
                latest,
            )

    def _all(self, name: str, holds: Callable[[float], bool]) -> bool:
        return all(name in metrics and holds(metrics[name]) for metrics in self._recent)

    def _warn(self, kind: str, message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, *values)
