"""Bookkeeping of gradients accumulated for a batch that is not complete yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics

if TYPE_CHECKING:
    from dagrl.workers.megatron.expert_load import ExpertLoad


@dataclass(frozen=True)
class AccumulatedParts:
    """The parts of a batch processed so far: undivided metrics, seconds, routing, lengths of rows and of saved prefixes."""

    parts: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    seconds: float = 0.0
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    saved: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    loads: tuple[ExpertLoad, ...] = ()

    def with_part(
        self,
        metrics: StepMetrics,
        seconds: float,
        lengths: npt.NDArray[Any],
        saved: npt.NDArray[np.int64],
        load: ExpertLoad,
    ) -> AccumulatedParts:
        """Returns these parts and one more."""
        merged, spent = merge_step_metrics([self.metrics, metrics]), self.seconds + seconds
        rows, prefixes = np.concatenate([self.lengths, lengths]), np.concatenate([self.saved, saved])
        return AccumulatedParts(self.parts + 1, merged, spent, rows, prefixes, (*self.loads, load))

    def before(self, parts: int) -> AccumulatedParts:
        """Returns what the next part is added to, after `parts` earlier ones; nothing if it is the first.

        Raises RunError if this worker has accumulated another number of parts.
        """
        if parts == 0:
            return AccumulatedParts()
        if parts != self.parts:
            raise RunError(
                f"the batch follows {parts} accumulated parts, but this worker has {self.parts}; replay "
                "accumulate_gradients with the scalar parts = 0, 1, 2, ..., then train_step with their number"
            )
        return self
