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
        self._first_entropy = 0.0
        self._warned: set[int] = set()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Logs what has lasted for `PATIENCE` steps."""
        self._recent.append(metrics)
        first = self._first_entropy = self._first_entropy or metrics.get(ENTROPY, 0.0)
        change = f"from {first:.3g} to {metrics.get(ENTROPY, first):.3g} nats per token"
        lasting: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            (
                EQUAL_GROUPS,
                lambda share: share == 1.0,
                f"the rewards of every group have been equal for {PATIENCE} steps, so there is nothing to learn from. Check "
                "reward.function and policy.generation.max_new_tokens, or use easier prompts, a higher "
                "policy.generation.temperature or more grpo.num_generations_per_prompt",
            ),
            (
                ENTROPY,
                lambda entropy: entropy < ENTROPY_COLLAPSE * first,
                f"the policy's entropy fell {change}: samples of a group become equal. Raise loss_fn.ratio_clip_max or "
                "policy.generation.temperature, or lower policy.optimizer.lr",
            ),
            (
                ENTROPY,
                lambda entropy: first > 0 and entropy > ENTROPY_GROWTH * first,
                f"the policy's entropy grew {change}: it becomes random. Lower policy.optimizer.lr, and check "
                "gen_kl_error and the rewards",
            ),
            (
                KL,
                lambda divergence: divergence > KL_LIMIT,
                f"the policy's KL divergence from the reference is {metrics.get(KL, 0.0):.3g} nats per token. Lower "
                "policy.optimizer.lr, or raise loss_fn.reference_policy_kl_penalty",
            ),
        )
        for number, (name, holds, warning) in enumerate(lasting):
            lasts = len(self._recent) == PATIENCE and all(name in one and holds(one[name]) for one in self._recent)
            if lasts and number not in self._warned:
                self._warned.add(number)
                logger.warning(warning)
