"""Megatron's top-k router with a load-balancing loss, replayed experts, and counts of each expert's load.

The loss (`dagrl.workers.train.routing`) has the router's probability of each expert: a softmax, or a sigmoid over the sum of
all (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).

A hook passes each layer's router the microbatch, also when activations are recomputed.

Routers count on the device. One all-reduce and one read per step turn the counts into metrics (`ExpertLoad`). Imported
only where Megatron is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dagrl.telemetry.metrics import (
    BUSIEST_EXPERT,
    BUSIEST_EXPERT_OF_WORST_LAYER,
    LOAD_BALANCING_LOSS,
    REPLAYED_AGREEMENT,
    REPLAYED_TOKENS,
    ROUTER_ENTROPY,
    UNUSED_EXPERTS,
    StepMetrics,
)
from dagrl.workers.train.microbatches import Microbatches, RoutedTokens
from dagrl.workers.train.routing import count_replayed, imbalance, tokens_by_expert, with_record


@dataclass
class StepCounts:
    """Counts of the routers of all layers, or of one, in a step.

    `tokens` are those of the global batch. `by_expert` [layers, experts]: tokens of each expert, without padding. `sums`
    [layers, 4]: load-balancing loss, entropy of the probabilities in nats, pairs of token and expert that were replayed, and
    those among them that the router chose too.
    """

    tokens: Tensor
    by_expert: Tensor
    sums: Tensor

    @staticmethod
    def empty(layers: int, experts: int, device: torch.device) -> StepCounts:
        """Allocates the counts."""
        return StepCounts(
            torch.zeros((), device=device),
            torch.zeros(layers, experts, dtype=torch.int64, device=device),
            torch.zeros(layers, 4, dtype=torch.float64, device=device),
        )

    def start(self, tokens: float) -> None:
        """Sets all to zero, and the tokens of this shard's batch."""
        self.by_expert.zero_()
        self.sums.zero_()
        self.tokens.fill_(tokens)

    def of_layer(self, number: int) -> StepCounts:
        """Returns the counts of one layer: views without the first dimension."""
        return StepCounts(self.tokens, self.by_expert[number], self.sums[number])


class _Choice:
    """Megatron's `router_replay` argument: uses recorded experts where there are any. `own` are the router's choice."""

    def __init__(self, recorded: Tensor | None) -> None:
        self.recorded, self.own, self.chosen = recorded, torch.empty(0), torch.empty(0)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns scores and ids [tokens, top k] of each token's experts. `scores` [tokens, experts]."""
        values, self.own = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self.chosen = self.own
        if self.recorded is None:
            return values, self.own
        self.chosen = with_record(self.recorded, self.own, scores.shape[1])
        return scores.gather(1, self.chosen), self.chosen


class Router(TopKRouter):  # type: ignore[misc]
    """Megatron's router with the module's loss and counts. `tokens` are those of the running microbatch.

    `counts` are this layer's, None outside of training steps. `chosen` are the last experts [tokens, top k].
    """

    tokens: RoutedTokens | None = None
    counts: StepCounts | None = None
    chosen: Tensor

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns probabilities and the map of chosen experts [tokens, experts], for hidden states [s, b, hidden size]."""
        config = self.config
        logits = self.gating(hidden).view(-1, config.num_moe_experts)
        experts = None if self.tokens is None else self.tokens.experts  # recorded ones, of all layers
        choice = _Choice(None if experts is None else experts[:, self.layer_number - 1].long())
        probabilities, chosen = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            expert_bias=self.expert_bias,
            score_function=self.score_function,
            router_replay=choice,
        )
        self.chosen = choice.chosen
        # Once per microbatch: recomputed activations are first computed without gradients.
        if self.counts is not None and self.tokens is not None and torch.is_grad_enabled():
            with torch.set_grad_enabled(bool(config.moe_aux_loss_coeff)):
                balance = self._balance(logits, choice, self.counts, self.tokens.valid)
            if config.moe_aux_loss_coeff:
                probabilities = MoEAuxLossAutoScaler.apply(probabilities, config.moe_aux_loss_coeff * balance)
        return probabilities, chosen

    def _balance(self, logits: Tensor, choice: _Choice, counts: StepCounts, valid: Tensor) -> Tensor:
        """Returns this worker's share of the layer's loss, without the coefficient, and counts the microbatch."""
        scores = self._probabilities(logits)
        balance = scores.new_zeros(())
        if self.config.moe_aux_loss_coeff:
            # An expert bias corrects the choice; the loss is of what the router would choose without it.
            own = choice.own if self.expert_bias is None else scores.topk(self.topk, -1).indices
            balance = imbalance(scores, own, valid, self.tp_cp_group) / counts.tokens
        with torch.no_grad():
            entropy = (torch.special.entr(scores).sum(-1) * valid).sum() / counts.tokens
            counts.by_expert += tokens_by_expert(choice.chosen, valid, scores.shape[1]).to(torch.int64)
            replayed = count_replayed(choice.recorded, choice.own, valid, scores.shape[1])
            counts.sums += torch.stack([balance, entropy, *replayed])
        return balance

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Returns float32 probabilities [tokens, experts]: a softmax, or normalized sigmoids."""
        if self.score_function == "softmax":
            return logits.softmax(-1, dtype=torch.float32)
        scores = logits.float().sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def pass_tokens_to_routers(model: Any) -> None:
    """Makes each expert layer of a model give its router the microbatch that runs."""

    def pass_tokens(layer: Any, _: Any, named: dict[str, Any]) -> None:
        inputs = named["packed_seq_params"]
        layer.mlp.router.tokens = None if inputs is None else inputs.routed

    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.register_forward_pre_hook(pass_tokens, with_kwargs=True)


def routers(chunks: Any) -> Iterator[Router]:
    """Yields the routers of a model's chunks, layer by layer."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                yield module


class ExpertLoad:
    """Counts of this worker's routers in the last training pass; none on a stage without experts."""

    def __init__(self, chunks: Sequence[Any], config: TransformerConfig) -> None:
        self._chunks, self._config = chunks, config
        self._counts: StepCounts | None = None  # one memory for all steps, as recorded passes write to it
        self._complete = False  # whether the last pass has counted
        self._replays = False  # whether its batch has a record of experts

    @contextmanager
    def counting(self, batch: Microbatches) -> Iterator[None]:
        """Makes the routers count the microbatches of `batch`, and add the loss, in the block. A collective over dp."""
        layer_routers = list(routers(self._chunks))
        if not layer_routers:
            yield
            return
        if self._counts is None:
            self._counts = StepCounts.empty(len(layer_routers), self._config.num_moe_experts, batch.items[0].tokens.device)
        self._complete = False
        self._counts.start(batch.filled * batch.rank.layout.cp)
        dist.all_reduce(self._counts.tokens, group=batch.rank.data_group)
        for number, router in enumerate(layer_routers):
            router.counts = self._counts.of_layer(number)
        try:
            yield
            self._replays = any(item.routed is not None and item.routed.experts is not None for item in batch.items)
            self._complete = True
        finally:
            for router in layer_routers:
                router.counts = None

    def read(self) -> StepMetrics:
        """Returns the metrics, on one worker of each pipeline stage. All workers call it; it waits for the device."""
        if self._counts is None or not self._complete:
            return StepMetrics()
        layers_here, experts = self._counts.by_expert.shape
        totals = torch.cat([self._counts.sums.sum(0), self._counts.by_expert.flatten().double()])
        stage = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(totals, group=stage)
        if dist.get_rank(stage):
            return StepMetrics()
        load = totals[4:].view(layers_here, experts)
        busiest = load.amax(-1) / load.mean(-1).clamp(min=1e-9)
        figures = torch.stack([busiest.sum(), busiest.max(), (load == 0).double().mean(-1).sum(), load[0].sum()])
        balance, entropy, replayed, equal, busy, worst, unused, pairs = torch.cat([totals[:4], figures]).tolist()
        sums = {ROUTER_ENTROPY: entropy, BUSIEST_EXPERT: busy, UNUSED_EXPERTS: unused}
        if self._config.moe_aux_loss_coeff:
            sums[LOAD_BALANCING_LOSS] = balance
        if self._replays:
            sums[REPLAYED_TOKENS] = replayed / max(pairs, 1.0)
            sums[REPLAYED_AGREEMENT] = equal / max(replayed, 1.0) * layers_here
        layers = sum(self._config.moe_layer_freq)  # of all stages
        return StepMetrics({name: value / layers for name, value in sums.items()}, {BUSIEST_EXPERT_OF_WORST_LAYER: worst})
