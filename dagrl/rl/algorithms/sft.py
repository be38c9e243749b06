"""Supervised fine-tuning: the negative log-likelihood of demonstrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagrl.rl.algorithm import Algorithm

if TYPE_CHECKING:
    from dagrl.rl.token_losses import TokenBatch, TokenResult


class Sft(Algorithm):
    """The mean negative log-likelihood of the tokens that are learned."""

    learns_from = "demonstrations"
    columns = {}

    def loss(self, batch: TokenBatch) -> TokenResult:
        """Returns minus the log-probability."""
        return -batch.logprobs
