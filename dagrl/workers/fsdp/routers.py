"""The routers of a transformers model with experts: replayed experts, and a load-balancing loss.

A class says which of its modules give `router_logits`. Each of these calls `torch.topk` on a score per expert, so its choice
is replaced there (`_Choice`), whatever it makes of the scores. `dagrl.workers.train.routing` has the loss. Imported only
where torch is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dagrl.errors import ConfigError
from dagrl.rl.routed_experts import RoutedLayers
from dagrl.telemetry.metrics import LOAD_BALANCING_LOSS, REPLAYED_AGREEMENT, REPLAYED_TOKENS, StepMetrics
from dagrl.workers.train.microbatches import Microbatches, RoutedTokens
from dagrl.workers.train.routing import count_replayed, imbalance, with_record

_LAYER = re.compile(r"\.(\d+)\.")


class Routers:
    """All routers of a model. `coefficient` is that of the load-balancing loss."""

    def __init__(self, net: nn.Module, sizes: RoutedLayers, coefficient: float, device: torch.device) -> None:
        self._sizes, self._coefficient = sizes, coefficient
        self._group: dist.ProcessGroup | None = None  # of all ranks with other tokens, while these are counted
        self._context: dist.ProcessGroup | None = None  # of the ranks with the rest of a microbatch
        self._total = torch.zeros((), device=device)  # tokens of the global batch
        self._tokens: RoutedTokens | None = None
        self._seen: list[tuple[Tensor, _Choice]] | None = None  # logits and choices by layer, while they are collected
        self._imbalances: list[Tensor] = []  # of the microbatch, by layer
        self._counts: list[Tensor] = []  # of the step: imbalance, replayed experts, those that the router chose too, all
        for layer, router, index in find_routers(net):
            router.forward = partial(self._run, router.forward, layer, index)

    def begin(self, batch: Microbatches, *, counting: bool) -> None:
        """Begins a pass over a batch, in a training step with its losses and counts. A collective then."""
        self._counts, self._group = [], batch.rank.data_group if counting else None
        self._context = batch.rank.context_group
        if counting:
            self._total.fill_(batch.filled)
            dist.all_reduce(self._total, group=self._group)

    @contextmanager
    def running(self, tokens: RoutedTokens | None) -> Iterator[None]:
        """Routes the `tokens` of a microbatch in the block and, for recomputed layers, until the next one."""
        self._tokens, self._seen = tokens, None if self._group is None else []
        try:
            yield
            if self._seen is not None and tokens is not None:  # here, as recomputed layers save the same tensors again
                self._imbalances = [self._count(*one, tokens.valid) for one in self._seen]
        finally:
            self._seen = None

    def loss(self) -> Tensor:
        """Returns the microbatch's share of the load-balancing losses."""
        if not self._coefficient:
            return self._total.new_zeros(())
        return self._coefficient * torch.stack(self._imbalances).sum() / self._total

    def metrics(self) -> StepMetrics:
        """Returns the metrics of a training step, on the first of all workers. A collective."""
        if not self._counts:
            return StepMetrics()
        counts = torch.stack(self._counts).sum(0)
        dist.all_reduce(counts, group=self._group)
        imbalance, replayed, equal, pairs = counts.tolist()
        if dist.get_rank():
            return StepMetrics()
        sums = {LOAD_BALANCING_LOSS: imbalance / pairs * self._sizes.chosen} if self._coefficient else {}
        if replayed:
            sums |= {REPLAYED_TOKENS: replayed / pairs, REPLAYED_AGREEMENT: equal / replayed}
        return StepMetrics(sums)

    def _run(self, forward: Callable[..., Any], layer: int, index: int, *args: Any, **named: Any) -> Any:
        """Runs the router of a layer. `index`: the place of the logits in its output."""
        tokens = self._tokens
        recorded = None if tokens is None or tokens.experts is None else tokens.experts[:, layer].long()
        with _Choice(recorded, self._sizes) as choice:
            output = forward(*args, **named)
        if self._seen is not None:
            self._seen.append((output[index], choice))
        return output

    def _count(self, logits: Tensor, choice: _Choice, valid: Tensor) -> Tensor:
        """Counts a layer's tokens. Returns E sum_t sum_i p_ti f_i."""
        experts = self._sizes.experts
        probabilities = logits.view(-1, experts).softmax(-1, dtype=torch.float32)
        uneven = imbalance(probabilities, choice.own, valid, self._context)
        with torch.no_grad():
            replayed, equal = count_replayed(choice.recorded, choice.own, valid, experts)
            self._counts.append(torch.stack([uneven, replayed, equal, valid.float().sum() * self._sizes.chosen]))
        return uneven


class _Choice(TorchFunctionMode):
    """Replaces the chosen experts by `recorded` ones [tokens, top k], where there are any. `own`: the router's choice."""

    def __init__(self, recorded: Tensor | None, sizes: RoutedLayers) -> None:
        super().__init__()
        self.recorded, self._sizes = recorded, sizes
        self.own = torch.empty(0)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, chosen = args[0], found.indices
        if (scores.shape[-1], chosen.shape[-1]) != (self._sizes.experts, self._sizes.chosen):  # of groups of experts
            return found
        self.own = chosen.view(-1, self._sizes.chosen)
        if self.recorded is None:
            return found
        recorded = with_record(self.recorded, self.own, self._sizes.experts).view_as(chosen)
        return torch.return_types.topk((scores.gather(-1, recorded), recorded))


def find_routers(net: nn.Module) -> list[tuple[int, Any, int]]:
    """Returns the layer's number of each router, the module, and the place of the logits in its output.

    Raises ConfigError for a model without any.
    """
    recorder = getattr(net, "_can_record_outputs", {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    found = [(name, part) for name, part in net.named_modules() if kind is not None and isinstance(part, kind)]
    if not found:
        raise ConfigError(
            f"{type(net).__name__} has no routers that transformers names, so no experts are replayed or balanced; set "
            "policy.router_replay=false and policy.fsdp_cfg.moe_aux_loss_coeff=0"
        )
    return [(int(_LAYER.findall(f".{name}.")[0]), part, recorder.index) for name, part in found]  # type: ignore[union-attr]
