"""Experts that are replayed or balanced, whatever routes to them. Imported only where torch is.

With p_ti the router's probability of expert i for token t, f_i the share of the chosen experts of the microbatch that are i,
and N the tokens of the global batch, a layer adds to the loss

  coefficient * E / N * sum_t sum_i p_ti * f_i      Switch Transformer, arXiv:2101.03961, equations 4 to 6

Padding, whose tokens are not `valid`, takes no part.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def with_record(recorded: Tensor, own: Tensor, experts: int) -> Tensor:
    """Returns `recorded` ids [tokens, top k] where a token has a record, else the router's `own`."""
    return torch.where(_has_record(recorded, experts), recorded, own)


def count_replayed(recorded: Tensor | None, own: Tensor, valid: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns how many experts of valid tokens were replayed, and how many of them the router chose too."""
    if recorded is None:
        nothing = valid.new_zeros((), dtype=torch.float32)
        return nothing, nothing
    used = _has_record(recorded, experts) & valid[:, None]
    equal = (recorded[:, :, None] == own[:, None, :]).any(-1)
    return used.expand_as(equal).sum().float(), (equal & used).sum().float()


def tokens_by_expert(chosen: Tensor, valid: Tensor, experts: int) -> Tensor:
    """Counts the `valid` tokens [tokens] among those that have `chosen` [tokens, top k] each expert -> float32 [experts]."""
    weights = valid.float()[:, None].expand_as(chosen).flatten()
    return weights.new_zeros(experts).index_add_(0, chosen.flatten(), weights)


def imbalance(probabilities: Tensor, own: Tensor, valid: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns E sum_t sum_i p_ti f_i over this worker's tokens. `group` has the rest of the microbatch, if others have."""
    experts = probabilities.shape[1]
    load = tokens_by_expert(own, valid, experts)
    if group is not None:
        dist.all_reduce(load, group=group)
    shares = load / load.sum().clamp(min=1)
    return ((probabilities * shares).sum(-1) * valid).sum() * experts


def _has_record(recorded: Tensor, experts: int) -> Tensor:
    """Returns which tokens [tokens, 1] have a record."""
    return ((recorded >= 0) & (recorded < experts)).all(-1, keepdim=True)
