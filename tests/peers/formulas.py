"""Random samples for comparisons with peers' formulas, and our loss of them, split as over train workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.losses import Denominators, batch_loss
from dagrl.rl.token_losses import Sequences

GROUPS, SIZE, WIDTH = 4, 4, 11
ROWS = GROUPS * SIZE
TOKEN_FIELDS = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages", "loss_mask")


@dataclass(frozen=True)
class Samples:
    """Responses [ROWS, WIDTH] of different lengths; `data` as a train worker has it."""

    logprobs: Tensor
    data: dict[str, Tensor]

    @property
    def mask(self) -> Tensor:
        return self.data["loss_mask"]

    def gradient(self, loss: Tensor) -> Tensor:
        """Returns the gradient of `loss` [ROWS, WIDTH] in the log-probabilities, 0 outside the mask."""
        (found,) = torch.autograd.grad(loss, self.logprobs)
        return found * self.mask


def random_samples(seed: int, dtype: torch.dtype = torch.float32) -> Samples:
    """Ratios from about 0.2 to 5, advantages of both signs, an environment's tokens between the policy's."""
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)

    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=draw)
    mask = (torch.arange(WIDTH)[None] < lengths) & (torch.rand(ROWS, WIDTH, generator=draw) < 0.9)
    mask[:, 0] = True
    old = -2 + normal(0.5)
    data = {
        "loss_mask": mask,
        "prev_logprobs": old,
        "generation_logprobs": old + normal(0.3),
        "reference_logprobs": old + normal(0.5),
        "advantages": normal(1.0)[:, :1].expand(ROWS, WIDTH),
    }
    data = {name: value.to(dtype).contiguous() for name, value in data.items()}
    return Samples((old + normal(0.6)).to(dtype).requires_grad_(), data)


def configuration(**loss_fn: Any) -> Config:
    """Returns a configuration whose loss has these keys, without a KL penalty unless they set one."""
    section = {"reference_policy_kl_penalty": 0.0, **loss_fn}
    return Config.model_validate(
        {"name": "peers", "algorithm": "grpo", "data": {}, "policy": {"model_name": "none"}, "loss_fn": section}
    )


@dataclass(frozen=True)
class Part:
    """The tokens of one worker: sequences packed into one row [1, n]. `rows` and `columns` say which tokens they are."""

    rows: Tensor
    columns: Tensor
    group: Any = field(default=None)

    def loss(self, samples: Samples, loss_fn: dict[str, Any]) -> Tensor:
        """Returns this worker's share of the loss of the whole batch."""
        data = {name: samples.data[name][self.rows, self.columns][None] for name in TOKEN_FIELDS}
        logprobs = samples.logprobs[self.rows, self.columns][None]
        denominators = Denominators(float(samples.mask.sum()), float((samples.mask.sum(1) > 0).sum()))
        sequences = Sequences(self.rows[None], ROWS, self.group)
        return batch_loss(algorithm_of(configuration(**loss_fn)), logprobs, data, denominators, sequences).loss


def shards(count: int) -> Iterator[Part]:
    """Yields the parts of `count` data-parallel workers: every `count`-th row, packed in another order."""
    for shard in range(count):
        rows = torch.arange(shard, ROWS, count).flip(0)
        yield Part(rows.repeat_interleave(WIDTH), torch.arange(WIDTH).repeat(len(rows)))


def context_part(rank: int, group: Any) -> Part:
    """Returns the part of one of two context-parallel workers: the first and last quarter of each row, or the middle."""
    first, last = WIDTH // 4, WIDTH - WIDTH // 4
    outer = (torch.arange(WIDTH) < first) | (torch.arange(WIDTH) >= last)
    mine = torch.arange(WIDTH)[outer if rank == 0 else ~outer]
    return Part(torch.arange(ROWS).repeat_interleave(len(mine)), mine.repeat(ROWS), group)


def our_loss(samples: Samples, **loss_fn: Any) -> Tensor:
    """Returns our loss of the samples, packed and split over two data-parallel workers."""
    return torch.stack([part.loss(samples, loss_fn) for part in shards(2)]).sum()
