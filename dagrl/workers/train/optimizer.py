"""The learning-rate schedule, and the order of an optimizer step. Importing this needs no torch."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from dagrl.config import Config
from dagrl.config.plan import optimizer_steps
from dagrl.telemetry.metrics import GRAD_NORM, SKIPPED_STEPS

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # added to the norm before the limit is divided by it, as in torch and Megatron


class Gradients(Protocol):
    """The gradients and the optimizer of a model. `OptimizerSteps.take` calls them in this order."""

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the whole model's gradients, each counted once: a scalar on the device, equal on all ranks."""

    def clip(self, limit: float, norm: Tensor) -> None:
        """Multiplies all gradients by `limit / norm`, now or as `update` reads them."""

    def update(self, rate: float) -> None:
        """Updates the weights with this learning rate."""


@dataclass
class OptimizerSteps:
    """Counts optimizer steps: those `taken`, by which the learning rate goes, and those `skipped`."""

    config: Config
    taken: int = 0
    skipped: int = 0

    @cached_property
    def _end(self) -> int:
        schedule = self.config.policy.scheduler
        return max(schedule.lr_decay_iters or optimizer_steps(self.config), schedule.lr_warmup_iters + 1)

    @property
    def rate(self) -> float:
        """The learning rate of the next step: Megatron's `OptimizerParamScheduler`, in closed form."""
        optimizer, schedule = self.config.policy.optimizer, self.config.policy.scheduler
        warmup, low = schedule.lr_warmup_iters, optimizer.min_lr
        if warmup and self.taken <= warmup:
            return schedule.lr_warmup_init + (optimizer.lr - schedule.lr_warmup_init) * self.taken / warmup
        if schedule.lr_decay_style == "constant":
            return optimizer.lr
        part = min(1.0, (self.taken - warmup) / (self._end - warmup))
        share = 1.0 - part if schedule.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * part) + 1.0)
        return low + share * (optimizer.lr - low)

    def take(self, model: Gradients, lr: float | None, *, apply: bool) -> dict[str, float]:
        """Clips the accumulated gradients and updates the weights, with `lr` in place of the schedule's rate if it is given.

        Returns `grad_norm` (before clipping), `lr` and `skipped_steps`. Without `apply`, does everything but the update. A
        step whose gradient norm is zero, or not finite on any worker, is skipped on all and counted: otherwise moments and
        weight decay would change weights without a learning signal.
        """
        import torch
        import torch.distributed as dist

        rate, limit = self.rate if lr is None else lr, self.config.policy.optimizer.clip_grad
        with torch.no_grad():
            total = model.gradient_norm()
            agreed = (torch.isfinite(total) & (total > 0)).float()
            if dist.is_initialized():
                dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            norm, usable = torch.stack([total, agreed]).tolist()
            if usable and 0 < limit < norm + CLIP_EPSILON:
                model.clip(limit, total)
            if usable and apply:
                model.update(rate)
                self.taken += 1
        if not usable and apply:
            self.skipped += 1
            logger.warning("gradient norm is %s: step skipped, weights unchanged (%d so far)", norm, self.skipped)
        return {GRAD_NORM: norm, "lr": rate, SKIPPED_STEPS: float(self.skipped)}
