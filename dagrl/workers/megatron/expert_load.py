"""Metrics of a step's routing: the router's losses and entropy, and how evenly tokens are spread over the experts.

With `moe_router_bias_update_rate` the counts also move the expert biases. Routers count on the device (`router.py`). Two
all-reduces and one read per step turn the counts into metrics. Imported only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
from torch import Tensor

from dagrl.telemetry.metrics import (
    BUSIEST_EXPERT,
    BUSIEST_EXPERT_OF_SEQUENCES,
    BUSIEST_EXPERT_OF_WORST_LAYER,
    LOAD_BALANCING_LOSS,
    REPLAYED_AGREEMENT,
    REPLAYED_TOKENS,
    ROUTER_ENTROPY,
    UNUSED_EXPERTS,
    Z_LOSS,
    StepMetrics,
)
from dagrl.workers.megatron.model import ModelChunks
from dagrl.workers.megatron.router import StepCounts, routers
from dagrl.workers.train.microbatches import Microbatches


class ExpertLoad:
    """What the routers of this worker counted in the last training pass; nothing on a stage without experts."""

    def __init__(self, model: ModelChunks) -> None:
        self._model = model
        self._memory: StepCounts | None = None  # in which routers count, for the largest batch so far
        self._counts: StepCounts | None = None
        self._replays = False  # whether the batch has a record of experts

    @contextmanager
    def counting(self, batch: Microbatches, forget_recordings: Callable[[], None]) -> Iterator[None]:
        """Context in which the routers count the microbatches of `batch`, and have losses. A collective over the shards.

        They count in memory for `batch.room` rows, which stays for later batches, as recorded passes write to it.
        """
        found, self._counts = list(routers(self._model.chunks)), None
        if not found:
            yield
            return
        counts = self._memory
        if counts is None or counts.by_row.shape[1] <= batch.room:
            if counts is not None:
                forget_recordings()
            experts, device = self._model.architecture.experts, batch.items[0].tokens.device
            self._memory = counts = StepCounts.empty(len(found), batch.room, experts, device)
        counts.start(batch.filled * batch.rank.layout.cp)
        dist.all_reduce(counts.tokens, group=batch.rank.data_group)
        for number, router in enumerate(found):
            router.counts = counts.of_layer(number)
        try:
            yield
            self._replays = any(item.routed is not None and item.routed.experts is not None for item in batch.items)
            self._counts = counts.copy(batch.room)
        finally:
            for router in found:
                router.counts = None

    def update_expert_biases(self) -> None:
        """Moves each expert's bias by the update rate: up if it had fewer tokens than the mean, down if more.

        As Megatron after a step (arXiv:2408.15664, algorithm 1), but padding does not count. A collective over the workers
        of a pipeline stage.
        """
        rate = self._model.config.moe_router_bias_update_rate
        found = [router for router in routers(self._model.chunks) if router.expert_bias is not None]
        if not rate or not found or self._counts is None:
            return
        tokens = self._counts.by_row[:, 1:].sum(1).float()  # [layers here, experts]
        updated = get_updated_expert_bias(tokens, torch.stack([router.expert_bias for router in found]), rate)
        for router, bias in zip(found, updated, strict=True):
            router.expert_bias.copy_(bias)

    def read(self) -> StepMetrics:
        """Returns the metrics, given by one worker of each pipeline stage. All workers call it; it waits for the device."""
        if self._counts is None:
            return StepMetrics()
        by_row, sums = self._counts.by_row[:, 1:].clone(), self._counts.sums.sum(0)  # [layers here, rows, experts], [5]
        dist.all_reduce(by_row, group=parallel_state.get_tensor_and_context_parallel_group())
        dist.all_reduce(sums, group=parallel_state.get_tensor_and_context_parallel_group())
        found = _metrics(by_row, sums, sum(self._model.architecture.moe_layers))
        config = self._model.config
        off = {
            LOAD_BALANCING_LOSS: not config.moe_aux_loss_coeff,
            Z_LOSS: not config.moe_z_loss_coeff,
            REPLAYED_TOKENS: not self._replays,
            REPLAYED_AGREEMENT: not self._replays,
        }
        return StepMetrics({name: value for name, value in found.sums.items() if not off.get(name)}, found.maxima)


def _metrics(by_row: Tensor, sums: Tensor, layers: int) -> StepMetrics:
    """Returns this stage's share of the metrics. `by_row` [layers here, rows, experts], `sums` [5] of this shard."""
    experts = by_row.shape[2]
    used = by_row[0].sum(-1) > 0  # [rows]: not padding
    sequences = (_busiest(by_row[:, used]).sum(), used.sum().double())
    of_shards = torch.cat([sums, torch.stack(sequences), by_row.sum(1).flatten().double()])
    dist.all_reduce(of_shards, group=parallel_state.get_data_parallel_group())
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) or parallel_state.get_tensor_model_parallel_rank():
        return StepMetrics()
    here, load = by_row.shape[0], of_shards[7:].view(-1, experts)
    busiest = _busiest(load)
    figures = torch.stack([busiest.sum(), busiest.max(), (load == 0).double().mean(-1).sum(), load[0].sum()])
    balance, z_loss, entropy, replayed, equal, ratios, rows, total, worst, unused, pairs = torch.cat(
        [of_shards[:7], figures]
    ).tolist()
    means = {
        LOAD_BALANCING_LOSS: balance,
        Z_LOSS: z_loss,
        REPLAYED_TOKENS: replayed / max(pairs, 1.0),
        REPLAYED_AGREEMENT: equal / max(replayed, 1.0) * here,
        ROUTER_ENTROPY: entropy,
        BUSIEST_EXPERT: total,
        BUSIEST_EXPERT_OF_SEQUENCES: ratios / max(rows, 1.0),
        UNUSED_EXPERTS: unused,
    }
    return StepMetrics({name: value / layers for name, value in means.items()}, {BUSIEST_EXPERT_OF_WORST_LAYER: worst})


def _busiest(load: Tensor) -> Tensor:
    """Returns the tokens of the busiest expert over the mean, of tokens by expert [..., experts]."""
    load = load.double()
    return load.amax(-1) / load.mean(-1).clamp(min=1e-9)
