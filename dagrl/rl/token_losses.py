"""Per-token policy losses: what each token of a sample costs. Choose one by `loss_fn.name`, or write your own.

    def sigmoid_ratio(batch: TokenBatch, *, slope: float = 4.0) -> Tensor:
        ratio = torch.exp(batch.logprobs - batch.old_logprobs)
        return -batch.advantages * torch.sigmoid(slope * (ratio - 1)) * 4 / slope

`loss_fn: {name: "my_losses:sigmoid_ratio", args: {slope: 2.0}}` trains with it. A function sees one microbatch, packed or
not, or one worker's part of it under context parallelism. It returns a cost [b, t] for each token, and optionally a
dictionary of further values [b, t], whose means become metrics. `dagrl.rl.algorithms` adds importance weights and the
KL penalty; masking, averages over the global batch and sums over workers are done for every algorithm
(`dagrl.rl.losses`). `batch.sequence_mean` spans a whole sequence, wherever it lies.

Sources:
  grpo       PPO's clipped surrogate, Schulman et al. 2017, arXiv:1707.06347, equation 7; separate bounds: DAPO, Yu et al.
             2025, arXiv:2503.14476; `ratio_clip_c`: Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep
             Reinforcement Learning", arXiv:1912.09729, equation 4 (dual clip)
  gspo       Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, equations 5 to 7 and 13
  cispo      MiniMax 2025, "MiniMax-M1", arXiv:2506.13585, equations 4 and 5
  reinforce  Williams 1992; used by RLOO (Ahmadian et al. 2024, arXiv:2402.14740) and REINFORCE++ (Hu et al. 2025,
             arXiv:2501.03262) with one optimizer step per batch
  distill    Agarwal et al. 2024, "On-Policy Distillation of Language Models", arXiv:2306.13649; per sampled token as in
             Lu et al. 2025, "On-Policy Distillation", https://thinkingmachines.ai/blog/on-policy-distillation/
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dagrl.config import LossConfig
from dagrl.errors import ConfigError
from dagrl.imports import check_arguments, load_named
from dagrl.telemetry.metrics import CLIP_RATIO

KEY = "loss_fn.name"

LOG_RATIO_CLAMP = 20.0  # bound of the logarithm of probability ratios, as verl's


@dataclass(frozen=True)
class Sequences:
    """Which sequence each token belongs to: `ids` [b, t], below `count`. `group`: the workers that hold parts of them."""

    ids: Tensor
    count: int
    group: Any = None

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """Returns for each token the sum of `values`, and the number of tokens, of its sequence in `mask` [2, b, t].

        Without gradient.
        """
        with torch.no_grad():
            inside = mask > 0
            parts = torch.stack([torch.where(inside, values, 0.0), inside.to(values.dtype)]).flatten(1)
            totals = parts.new_zeros(2, self.count).index_add_(1, self.ids.flatten(), parts)
            if self.group is not None:
                torch.distributed.all_reduce(totals, group=self.group)
            return totals[:, self.ids]


@dataclass(frozen=True)
class TokenBatch:
    """The input of a loss; all tensors [b, t]. Only `logprobs` has a gradient.

    `columns` are the fields of the batch, and what phases computed for it. Values outside `mask` are arbitrary, and ignored
    in the result. Without `sequences` every row is one. `lookup` computes `logprobs_of`.
    """

    logprobs: Tensor
    mask: Tensor
    columns: Mapping[str, Tensor]
    config: LossConfig = field(default_factory=LossConfig)
    sequences: Sequences | None = None
    lookup: Callable[[Tensor], Tensor] | None = None

    def column(self, name: str) -> Tensor:
        """Returns a column. Raises ConfigError if the batch has none of this name."""
        if name not in self.columns:
            raise ConfigError(
                f"the loss reads the column {name!r}, but the batch has only {', '.join(self.columns)}; if a phase computes "
                "it, name it in the algorithm's `columns`"
            )
        return self.columns[name]

    def with_columns(self, **columns: Tensor) -> TokenBatch:
        """Returns the batch with these columns added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probabilities of the policy before the optimizer step."""
        return self.column("prev_logprobs")

    @property
    def generation_logprobs(self) -> Tensor:
        """Log-probabilities of the engine that generated the tokens."""
        return self.column("generation_logprobs")

    @property
    def reference_logprobs(self) -> Tensor:
        """Log-probabilities of the reference policy."""
        return self.column("reference_logprobs")

    @property
    def advantages(self) -> Tensor:
        """The advantage of each token."""
        return self.column("advantages")

    @property
    def log_ratio(self) -> Tensor:
        """The policy's log-probability minus the old one, 0 outside the mask, clamped so that no token can overflow."""
        ratio = torch.where(self.mask > 0, self.logprobs - self.old_logprobs, 0.0)
        return ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)

    def clipped(self, ratio: Tensor) -> Tensor:
        """Bounds a ratio to `1 - ratio_clip_min` and `1 + ratio_clip_max`."""
        return ratio.clamp(1.0 - self.config.ratio_clip_min, 1.0 + self.config.ratio_clip_max)

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Returns the policy's log-probability, with gradient, of other tokens in place of each token: `ids` [b, t, k].

        It takes k times the work of the output layer.
        """
        if self.lookup is None:
            raise ConfigError("the loss reads log-probabilities of other tokens, which these workers do not compute")
        return self.lookup(ids.long())

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Returns for each token the mean of `values` over its sequence, without gradient [b, t]."""
        total, count = self._sequence_sums(values)
        return total / count

    @property
    def sequence_tokens(self) -> Tensor:
        """The number of tokens in the mask of each token's sequence, at least 1 [b, t]."""
        return self._sequence_sums(self.mask)[1]

    def _sequence_sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        sequences = self.sequences
        if sequences is None:
            rows = torch.arange(len(self.mask), device=self.mask.device)
            sequences = Sequences(rows[:, None].expand(self.mask.shape), len(rows))
        total, count = sequences.sums(values, self.mask)
        return total, count.clamp(min=1)


TokenResult = Tensor | tuple[Tensor, Mapping[str, Tensor]]
TokenLossFunction = Callable[..., TokenResult]


def grpo(batch: TokenBatch) -> TokenResult:
    """Returns the clipped surrogate of ratio r: `max(-A r, -A clip(r))`; with `ratio_clip_c` at most `-A c` if A < 0."""
    return _surrogate(batch, torch.exp(batch.log_ratio))


def gspo(batch: TokenBatch) -> TokenResult:
    """Returns the clipped surrogate with the sequence's ratio, the geometric mean of its tokens' ratios.

    Each token has the gradient of its own log-probability, so advantages may differ within a sequence (GSPO-token); equal
    ones give GSPO.
    """
    mean = batch.sequence_mean(batch.log_ratio)
    own = torch.where(batch.mask > 0, batch.logprobs - batch.logprobs.detach(), 0.0)
    return _surrogate(batch, torch.exp(mean + own))


def cispo(batch: TokenBatch) -> TokenResult:
    """Returns REINFORCE weighted by the clipped, detached ratio: clipped tokens keep their gradient."""
    ratio = torch.exp(batch.log_ratio).detach()
    clipped = batch.clipped(ratio)
    return -clipped * batch.advantages * batch.logprobs, _metrics(ratio, clipped, clipped != ratio)


def reinforce(batch: TokenBatch) -> TokenResult:
    """Returns minus the advantage times the log-probability."""
    return -batch.advantages * batch.logprobs


def distill(batch: TokenBatch) -> TokenResult:
    """Returns the reverse KL to the reference policy: the ratio times the old minus the reference log-probability.

    Over the policy's samples its gradient is that of KL(policy || reference) per token, for the prefixes as they are.
    Rewards and advantages are not used. Raises ConfigError without a reference policy.
    """
    if "reference_logprobs" not in batch.columns:
        raise ConfigError(
            f"{KEY} is 'distill', but there is no reference policy to learn from; set models.teacher.model_name"
        )
    ratio, gap = torch.exp(batch.log_ratio), batch.old_logprobs - batch.reference_logprobs
    return ratio * gap, {"policy/reverse_kl": gap, "probs_ratio": ratio}


def _surrogate(batch: TokenBatch, ratio: Tensor) -> TokenResult:
    clipped = batch.clipped(ratio)
    plain, bounded = -batch.advantages * ratio, -batch.advantages * clipped
    loss = torch.maximum(plain, bounded)
    if batch.config.ratio_clip_c is not None:
        most = -batch.advantages * batch.config.ratio_clip_c
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, most), loss)
    return loss, _metrics(ratio, clipped, bounded > plain)


def _metrics(ratio: Tensor, clipped: Tensor, acted: Tensor) -> dict[str, Tensor]:
    return {CLIP_RATIO: acted.to(ratio.dtype), "probs_ratio": ratio, "probs_ratio_clamped": clipped}


TOKEN_LOSSES: Mapping[str, TokenLossFunction] = MappingProxyType(
    {"grpo": grpo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce, "distill": distill}
)


def token_loss(config: LossConfig) -> TokenLossFunction:
    """Returns the function that `loss_fn.name` names, with `loss_fn.args`.

    Raises ConfigError if there is none, or if it does not take these arguments.
    """
    function = TOKEN_LOSSES.get(config.name) or load_named(config.name, TOKEN_LOSSES, KEY)
    check_arguments(function, config.args, config.name, "loss_fn.args", positional=["batch"])
    return partial(function, **config.args) if config.args else function


def evaluate(function: TokenLossFunction, batch: TokenBatch, name: str) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Calls the loss that messages call `name`.

    Raises ConfigError if its result has another shape than the tokens, or if it does not depend on the model.
    """
    result = function(batch)
    loss, means = result if isinstance(result, tuple) else (result, {})
    check_shapes(name, loss, means, list(batch.logprobs.shape), "a tensor of the shape of the tokens")
    if batch.logprobs.requires_grad and not loss.requires_grad:
        raise ConfigError(f"{name} does not depend on `batch.logprobs`, so nothing would train")
    return loss, means


def check_shapes(name: str, loss: object, means: Mapping[str, object], shape: list[int], expected: str) -> None:
    """Raises ConfigError unless what the function `name` returned are tensors of this shape, as `expected`."""
    for part, value in {"loss": loss, **means}.items():
        actual = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if actual != shape:
            raise ConfigError(f"{name} returned {actual} for {part!r}; expected: {expected}, {shape}")
