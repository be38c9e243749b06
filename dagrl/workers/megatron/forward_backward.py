"""Runs microbatches through Megatron's schedules: losses with gradients, losses only, or log-probabilities.

Every result of a microbatch is a share of a sum over the global batch (see `dagrl.rl.losses`). Gradients are summed over
microbatches, context-parallel and data-parallel workers, never averaged. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dagrl.rl.algorithm import Algorithm
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.rl.token_losses import Sequences
from dagrl.telemetry.metrics import ENTROPY, FILLED_TOKENS, PROCESSED_TOKENS, SAVED_TOKENS, StepMetrics
from dagrl.workers.megatron.cuda_graphs import ModelPass
from dagrl.workers.train.logprobs import OutputLayer, masked_columns, scored_logprobs, token_logprobs
from dagrl.workers.train.microbatches import Microbatch, Microbatches

LossResult = tuple[Tensor, Tensor, dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class MicrobatchLoss:
    """Computes a microbatch's share of the loss from its last hidden states, or from the numbers of a scalar head.

    `layer` is None for a scalar head, and on earlier stages, which compute no loss.

    `group`: the context-parallel workers, which hold parts of the same sequences; None if there is one.
    """

    algorithm: Algorithm
    denominators: Denominators
    layer: OutputLayer | None
    group: Any = None

    def __call__(self, microbatch: Microbatch, output: Tensor) -> LossResult:
        """Returns the loss, a count of 0 (so Megatron does not divide), and the metrics.

        `output` [b, s, hidden size], or [b, s] of a scalar head, whose numbers take the place of log-probabilities.
        """
        logprobs, entropy, data = output, None, microbatch.data
        if self.layer is not None:
            logprobs, entropy = scored_logprobs(output, microbatch.labels, microbatch.scored, self.layer)
            data = masked_columns(data, microbatch.scored)
        sequences = Sequences(data["sequence_ids"], microbatch.sequences, self.group)
        found = batch_loss(self.algorithm, logprobs, data, self.denominators, sequences)
        metrics = {"sums": dict(found.sums), "maxima": dict(found.maxima)}
        if self.algorithm.learns_from == "samples":
            before = data.get("entropy") if "prev_logprobs" in self.algorithm.columns else entropy
            if before is not None:  # under the weights at the start of the batch
                metrics["sums"][ENTROPY] = (before * data["loss_mask"]).sum() / self.denominators.tokens
        return found.loss, torch.zeros((), dtype=torch.int, device=output.device), metrics


def sum_gradients(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Calls Megatron's `finalize_model_grads` without dividing by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)


@dataclass(frozen=True)
class BatchLosses:
    """Metrics of a batch's microbatches, still on the device. `parts` is empty except on the last stage."""

    parts: list[dict[str, dict[str, Tensor]]]
    batch: Microbatches

    def read(self) -> StepMetrics:
        """Returns the metrics over all microbatches. Waits for the device, so launch other work first."""
        sums, maxima = ([part[kind] for part in self.parts] for kind in ("sums", "maxima"))
        saved = float(self.batch.saved.sum())
        tokens = {FILLED_TOKENS: self.batch.filled, SAVED_TOKENS: saved, PROCESSED_TOKENS: self.batch.processed}
        return StepMetrics(sums=_merge(sums, torch.sum) | tokens, maxima=_merge(maxima, torch.amax))


def run_losses(
    chunks: list[Any], model_pass: ModelPass, batch: Microbatches, loss: MicrobatchLoss, backward: bool
) -> BatchLosses:
    """Computes the losses of all microbatches. With `backward`, accumulates and reduces gradients."""
    return BatchLosses(_run(chunks, model_pass, batch, loss, forward_only=not backward), batch)


def run_logprobs(chunks: list[Any], model_pass: ModelPass, batch: Microbatches, layer: OutputLayer | None) -> list[Tensor]:
    """Returns token-aligned log-probabilities and entropy [rows, width] on the last stage, else an empty list."""

    def columns(microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert layer is not None, "the last pipeline stage has the output layer"
        return token_logprobs(hidden, microbatch.labels, layer)

    return run_columns(chunks, model_pass, batch, columns)


def run_columns(
    chunks: list[Any],
    model_pass: ModelPass,
    batch: Microbatches,
    columns: Callable[[Microbatch, Tensor], tuple[Tensor, ...]],
) -> list[Tensor]:
    """Returns what `columns` computes from each microbatch's output, token-aligned [rows, width], on the last stage.

    `columns` returns tensors [b, s] whose entry at a token belongs to the next one. Other stages get an empty list.
    """

    def score(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        nothing = torch.zeros((), device=output.device)
        return nothing, nothing.int(), columns(microbatch, output)

    with torch.no_grad():
        parts = _run(chunks, model_pass, batch, score, forward_only=True)
        return [batch.assemble(column) for column in zip(*parts, strict=True)]


def _run(
    chunks: list[Any],
    model_pass: ModelPass,
    batch: Microbatches,
    score: Callable[[Microbatch, Tensor], Any],
    forward_only: bool,
) -> list[Any]:
    """Runs Megatron's schedule over all microbatches. Returns the reports of `score` on the last stage."""

    def forward(microbatches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        microbatch = next(microbatches)
        return model_pass(chunk, microbatch), partial(score, microbatch)

    iterators = [iter(batch.items) for _ in chunks]
    several = len(chunks) > 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if several else iterators[0],
        model=chunks if several else chunks[0],
        num_microbatches=len(batch.items),
        seq_length=batch.shape[1],
        micro_batch_size=batch.shape[0],
        forward_only=forward_only,
    )
    return results


def _merge(parts: list[dict[str, Tensor]], join: Callable[..., Tensor]) -> dict[str, float]:
    """Reduces to one number per name, with one read from the device."""
    if not parts or not parts[0]:
        return {}
    table = join(torch.stack([torch.stack([value.float() for value in part.values()]) for part in parts]), dim=0)
    return dict(zip(parts[0], table.tolist(), strict=True))
