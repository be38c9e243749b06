"""What a train worker knows of the gradients that it accumulated for a batch that is not whole yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dagrl.errors import RunError
from dagrl.telemetry.metrics import StepMetrics, merge_step_metrics


@dataclass(frozen=True)
class Accumulated:
    """The parts of a batch that came before the rest: their metrics, not yet divided, seconds, and lengths of their rows."""

    parts: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    seconds: float = 0.0
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def with_part(self, metrics: StepMetrics, seconds: float, lengths: npt.NDArray[Any]) -> Accumulated:
        """One part more."""
        merged, rows = merge_step_metrics([self.metrics, metrics]), np.concatenate([self.lengths, lengths])
        return Accumulated(self.parts + 1, merged, self.seconds + seconds, rows)

    def before(self, parts: int) -> Accumulated:
        """What a part is to be added to that `parts` came before: nothing for the first.

        Raises RunError when others were accumulated.
        """
        if parts == 0:
            return Accumulated()
        if parts != self.parts:
            raise RunError(
                f"the batch is to be added to the gradients of {parts} parts, and this worker has those of {self.parts}; "
                "replay accumulate_gradients with the scalar parts = 0, 1, 2 and so on, then train_step with their number"
            )
        return self
