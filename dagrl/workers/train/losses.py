"""The loss of a microbatch, and the metrics of a batch's microbatches.

Every number is a share of a sum over the global batch (`dagrl.rl.losses`). Imported only where torch is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dagrl.rl.algorithm import Algorithm
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.rl.token_losses import Sequences
from dagrl.telemetry.metrics import ENTROPY, FILLED_TOKENS, PROCESSED_TOKENS, SAVED_TOKENS, StepMetrics
from dagrl.workers.train.logprobs import TokenHead, masked_columns, scored_logprobs
from dagrl.workers.train.microbatches import Microbatch, Microbatches

Report = Mapping[str, Mapping[str, Tensor]]  # `sums` and `maxima` of a microbatch, on the device


@dataclass(frozen=True)
class MicrobatchLoss:
    """A `Score` that computes a microbatch's share of the loss.

    `head` is None for a scalar head, whose values take the place of log-probabilities, and on stages without outputs.
    `group`: the context-parallel workers, which hold parts of the same sequences; None if there is one.
    """

    algorithm: Algorithm
    denominators: Denominators
    head: TokenHead | None
    group: Any = None

    def __call__(self, microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Report]:
        """Returns the loss and its report."""
        logprobs, entropy, data = output, None, microbatch.data
        if self.head is not None:
            logprobs, entropy = scored_logprobs(output, microbatch.labels, microbatch.scored, self.head)
            data = masked_columns(data, microbatch.scored)
        sequences = Sequences(data["sequence_ids"], microbatch.sequences, self.group)
        lookup = None if self.head is None else partial(self._lookup, microbatch, output, self.head)
        share = batch_loss(self.algorithm, logprobs, data, self.denominators, sequences, lookup)
        sums = dict(share.sums)
        if self.algorithm.learns_from == "samples":
            before = data.get("entropy") if "prev_logprobs" in self.algorithm.columns else entropy
            if before is not None:  # under the weights at the start of the batch
                sums[ENTROPY] = (before * data["loss_mask"]).sum() / self.denominators.tokens
        return share.loss, {"sums": sums, "maxima": share.maxima}

    @staticmethod
    def _lookup(microbatch: Microbatch, output: Tensor, head: TokenHead, ids: Tensor) -> Tensor:
        """See `TokenBatch.logprobs_of`."""
        return scored_logprobs(output, ids, microbatch.scored, head)[0]


def read_reports(reports: Sequence[Report], batch: Microbatches) -> StepMetrics:
    """Returns the metrics over all microbatches. Waits for the device, so launch other work first."""
    sums, maxima = ([report[kind] for report in reports] for kind in ("sums", "maxima"))
    saved = float(batch.saved.sum())
    tokens = {FILLED_TOKENS: batch.filled, SAVED_TOKENS: saved, PROCESSED_TOKENS: batch.processed}
    return StepMetrics(sums=_merge(sums, torch.sum) | tokens, maxima=_merge(maxima, torch.amax))


def _merge(parts: Sequence[Mapping[str, Tensor]], join: Callable[..., Tensor]) -> dict[str, float]:
    """Reduces to one number per name, with one read from the device."""
    if not parts or not parts[0]:
        return {}
    table = join(torch.stack([torch.stack([value.float() for value in part.values()]) for part in parts]), dim=0)
    return dict(zip(parts[0], table.tolist(), strict=True))
