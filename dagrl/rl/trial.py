"""Tries an algorithm on a few random rows before a run starts, to find mistakes in a user's file early."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dagrl.config import ALGORITHMS, Config
from dagrl.errors import ConfigError
from dagrl.imports import running
from dagrl.rl.advantages import rewards_at_end
from dagrl.rl.algorithm import KEY, Algorithm, advantages_of, algorithm_of, token_advantages_of
from dagrl.rl.preferences import PreferenceAlgorithm, pair_losses

if TYPE_CHECKING:
    import torch

ROWS, TOKENS = 2, 5


def try_algorithm(config: Config) -> None:
    """Raises ConfigError if the algorithm's loss or advantages fail, or give values that nothing can be learned from."""
    algorithm = algorithm_of(config)
    if algorithm.learns_from == "demonstrations" and algorithm.columns:
        raise ConfigError(
            f"{KEY}: {config.algorithm} learns from demonstrations and has the columns {', '.join(algorithm.columns)}; "
            "these are computed for samples. Set `columns = {}`"
        )
    if algorithm.learns_from == "preferences":
        try_pair_loss(algorithm)
        return
    try_loss(algorithm)
    if algorithm.learns_from == "samples":
        try_advantages(algorithm)


def try_loss(algorithm: Algorithm) -> None:
    """Runs the loss on random tokens. Raises ConfigError if it fails, or if its values or gradients are not finite."""
    import torch

    from dagrl.rl.losses import Denominators, batch_loss
    from dagrl.rl.token_losses import KEY as LOSS_KEY

    name, key = algorithm.config.algorithm, KEY
    if name in ALGORITHMS and algorithm.learns_from == "samples":
        name, key = algorithm.config.loss_fn.name, LOSS_KEY
    generator = torch.Generator().manual_seed(0)
    further = {"samples": ("generation_logprobs",), "demonstrations": ()}[algorithm.learns_from]
    data = {column: _logprobs(generator) for column in (*algorithm.columns, *further)}
    data["loss_mask"] = torch.ones(ROWS, TOKENS)
    if algorithm.learns_from == "samples":
        data["advantages"] = torch.tensor([[1.0], [-0.5]]).expand(ROWS, TOKENS)
    logprobs = _logprobs(generator).requires_grad_()
    with running(name, key):
        denominators = Denominators(ROWS * TOKENS, ROWS)
        output = batch_loss(algorithm, logprobs, data, denominators, lookup=lambda ids: _others(logprobs, ids))
        (gradient,) = torch.autograd.grad(output.loss, logprobs)
    if not (output.loss.isfinite() and gradient.isfinite().all()):
        raise ConfigError(f"{key}: {name} gives costs or gradients that are not finite for ordinary log-probabilities")


def try_pair_loss(algorithm: Algorithm) -> None:
    """Runs the loss on random pairs. Raises ConfigError if it fails, or if its values or gradients are not finite."""
    if not isinstance(algorithm, PreferenceAlgorithm):
        raise ConfigError(
            f"{KEY}: {algorithm.config.algorithm} learns from preferences; derive the class from dagrl.PreferenceAlgorithm"
        )
    generator = np.random.default_rng(0)
    reference = -generator.random(2 * ROWS) - 1 if "reference_logprobs" in algorithm.columns else None
    labels = np.arange(ROWS, dtype=np.float64) if algorithm.unpaired else None
    pair_losses(algorithm, -generator.random(2 * ROWS) - 1, np.full(2 * ROWS, TOKENS), reference, labels)


def _logprobs(generator: torch.Generator) -> torch.Tensor:
    import torch

    return -torch.rand(ROWS, TOKENS, generator=generator) - 0.1


def _others(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Stands for the log-probabilities of other tokens [rows, tokens, k]."""
    return logprobs[..., None].expand(*logprobs.shape, ids.shape[-1])


def try_advantages(algorithm: Algorithm) -> None:
    """Computes advantages of random rewards. Raises ConfigError if that fails."""
    config = algorithm.config
    rewards = np.random.default_rng(0).random((2, max(config.grpo.num_generations_per_prompt, 2)))
    advantages_of(algorithm, rewards, np.ones_like(rewards, np.bool_))
    if algorithm.critic:
        mask = np.ones((ROWS, TOKENS), np.float32)
        token_advantages_of(algorithm, rewards_at_end(rewards[:, 0], mask), mask, mask)
