"""Runs microbatches through Megatron's schedules: losses with gradients, losses alone, or log-probabilities.

Everything a microbatch yields is a part of a sum over the global batch (see `dagrl.losses`): gradients are added over
microbatches, context-parallel and data-parallel workers, and nothing is averaged. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from dagrl.config import LossConfig
from dagrl.losses import LOSSES, Denominators
from dagrl.telemetry.metrics import ENTROPY, FILLED_TOKENS, PROCESSED_TOKENS, StepMetrics
from workers.megatron.cuda_graphs import ModelPass
from workers.megatron.logprobs import OutputLayer, token_logprobs
from workers.megatron.microbatches import Microbatch, Microbatches

LossResult = tuple[Tensor, Tensor, dict[str, dict[str, Tensor]]]


@dataclass(frozen=True)
class LossStep:
    """What turns a microbatch's last hidden states into its part of the loss; `layer` is None where there are none."""

    name: str
    config: LossConfig
    denominators: Denominators
    layer: OutputLayer | None

    def __call__(self, microbatch: Microbatch, hidden: Tensor) -> LossResult:
        """The loss, a count of 0 (Megatron must not divide by one), and the metrics; `hidden` [b, s, hidden size]."""
        assert self.layer is not None, "the last pipeline stage has the output layer"
        logprobs, entropy = token_logprobs(hidden, microbatch.labels, self.layer)
        output = LOSSES[self.name](logprobs, microbatch.data, self.config, self.denominators)
        metrics = {"sums": dict(output.sums), "maxima": dict(output.maxima)}
        if self.name == "grpo" and self.config.force_on_policy_ratio:  # else known from before the step
            metrics["sums"][ENTROPY] = (entropy * microbatch.data["loss_mask"]).sum() / self.denominators.tokens
        return output.loss, torch.zeros((), dtype=torch.int, device=hidden.device), metrics


def sum_gradients(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's `finalize_model_grads` without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)


@dataclass(frozen=True)
class Losses:
    """What the microbatches of a batch reported, still on the device; `parts` is empty on all stages but the last."""

    parts: list[dict[str, dict[str, Tensor]]]
    batch: Microbatches

    def read(self) -> StepMetrics:
        """The metrics over all microbatches. Waits for the device, so what can be launched before should be."""
        sums, maxima = ([part[kind] for part in self.parts] for kind in ("sums", "maxima"))
        tokens = {FILLED_TOKENS: self.batch.filled, PROCESSED_TOKENS: self.batch.processed}
        return StepMetrics(sums=_merge(sums, torch.sum) | tokens, maxima=_merge(maxima, torch.amax))


def run_losses(chunks: list[Any], way: ModelPass, batch: Microbatches, loss: LossStep, backward: bool) -> Losses:
    """Losses of all microbatches, their gradients accumulated and reduced if `backward`."""
    return Losses(_run(chunks, way, batch, loss, forward_only=not backward), batch)


def accumulate_losses(chunks: list[Any], way: ModelPass, batch: Microbatches, loss: LossStep) -> Losses:
    """`run_losses` with gradients that are accumulated on each worker and not reduced over them yet."""
    model = get_model_config(chunks[0])  # one for all chunks
    reduce, model.finalize_model_grads_func = model.finalize_model_grads_func, None
    try:
        return run_losses(chunks, way, batch, loss, backward=True)
    finally:
        model.finalize_model_grads_func = reduce


def run_logprobs(chunks: list[Any], way: ModelPass, batch: Microbatches, layer: OutputLayer | None) -> list[Tensor]:
    """Log-probabilities and entropy [rows, width], token aligned, on the last stage; an empty list on the others."""

    def score(microbatch: Microbatch, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        assert layer is not None, "the last pipeline stage has the output layer"
        nothing = torch.zeros((), device=hidden.device)
        return nothing, nothing.int(), token_logprobs(hidden, microbatch.labels, layer)

    with torch.no_grad():
        parts = _run(chunks, way, batch, score, forward_only=True)
        return [batch.assemble(columns) for columns in zip(*parts, strict=True)]


def _run(
    chunks: list[Any],
    way: ModelPass,
    batch: Microbatches,
    score: Callable[[Microbatch, Tensor], Any],
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over all microbatches; what `score` reported for each, on the last stage."""

    def forward(microbatches: Iterator[Microbatch], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        microbatch = next(microbatches)
        return way(chunk, microbatch), partial(score, microbatch)

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
    """One number for each name, read from the device at once."""
    if not parts or not parts[0]:
        return {}
    table = join(torch.stack([torch.stack([value.float() for value in part.values()]) for part in parts]), dim=0)
    return dict(zip(parts[0], table.tolist(), strict=True))
