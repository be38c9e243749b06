"""Warns of a run that does not learn, or no longer does: rewards without contrast, entropy or KL that runs away.

Each warning is logged once per run and names the keys to look at. A run whose steps change no weights ends (`UpdateCount`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dagrl.errors import RunError
from dagrl.telemetry.metrics import ENTROPY, EQUAL_GROUPS, GRAD_NORM, KL, MASKED_MINIBATCHES

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Steps in a row after which a state counts as lasting."""

ENTROPY_COLLAPSE, ENTROPY_GROWTH = 0.05, 2.0
"""Entropy below, or above, this multiple of its first value runs away."""

KL_LIMIT = 1.0
"""Nats per token from the reference policy; runs that learn stay well below 0.2."""


LIMIT_KEY = "policy.optimizer.max_skipped_steps"

NO_TOKENS = (
    "no token was in the loss: the reward returned None or failed for every sample, or grpo.overlong_filtering left none"
)
ZERO = (
    "the gradient was 0: the advantages are all zero, as the rewards of every prompt's completions are equal "
    "(reward/equal_groups), or the loss does not depend on the policy"
)
NOT_FINITE = "the gradient norm was {norm:g}: the loss overflows for these batches, or the weights are not finite"


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


@dataclass
class UpdateCount:
    """Counts steps of this process that changed weights, in all and in the stage, and those in a row that changed none."""

    changed: int = 0
    changed_in_stage: int = 0
    unchanged: int = 0
    reason: str = ""
    stage: str = ""

    def begin(self, stage: str, steps: int) -> None:
        """Ends the stage before as `check_end` does, and begins another. `steps` of the run were taken before, also by an
        earlier process, of which some have changed weights."""
        self.check_end()
        self.stage, self.changed, self.changed_in_stage, self.unchanged = stage, steps, 0, 0

    def count(self, metrics: Mapping[str, float], limit: int) -> None:
        """Counts a finished step. Raises RunError if the last `limit` steps changed no weights."""
        if GRAD_NORM not in metrics and not metrics.get(MASKED_MINIBATCHES):
            return  # only a critic learned, or workers of another kind do not say
        norm = metrics.get(GRAD_NORM)
        if norm is not None and math.isfinite(norm) and norm > 0:
            self.changed, self.changed_in_stage, self.unchanged = self.changed + 1, self.changed_in_stage + 1, 0
            return
        self.unchanged += 1
        self.reason = NO_TOKENS if norm is None else ZERO if norm == 0 else NOT_FINITE.format(norm=norm)
        if self.unchanged >= limit:
            raise RunError(f"the last {limit} steps ({LIMIT_KEY}) changed no weights. In the last of them {self.reason}")

    def check_end(self) -> None:
        """Raises RunError if the stage has steps and none changed weights; if gradients were 0, as they may be when rewards
        are equal for a while, only if none of the run did."""
        if self.unchanged and not (self.changed if self.reason == ZERO else self.changed_in_stage):
            raise RunError(
                f"the run has learned nothing: none of its {self.unchanged} {self.stage} steps changed weights. In the last "
                f"of them {self.reason}"
            )
