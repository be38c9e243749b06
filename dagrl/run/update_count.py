"""Ends a run whose steps change no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dagrl.errors import RunError
from dagrl.telemetry.metrics import GRAD_NORM, MASKED_MINIBATCHES

LIMIT_KEY = "policy.optimizer.max_skipped_steps"

NO_TOKENS = (
    "no token was in the loss: the reward returned None or failed for every sample, or grpo.overlong_filtering left none"
)
ZERO = (
    "the gradient was 0: the advantages are all zero, as the rewards of every prompt's completions are equal "
    "(reward/equal_groups), or the loss does not depend on the policy"
)
NOT_FINITE = "the gradient norm was {norm:g}: the loss overflows for these batches, or the weights are not finite"


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
