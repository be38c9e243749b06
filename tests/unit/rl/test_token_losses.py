"""Token losses against the formulas of their papers or peers; losses of the user's own, valid and invalid."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.config import LossConfig
from dagrl.errors import ConfigError
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.losses import Denominators, row_sums
from dagrl.rl.token_losses import Sequences, TokenBatch, evaluate, token_loss
from dagrl.rl.trial import try_loss
from tests.unit.rl.losses_by_kind import LOSSES, config_of

ROWS, WIDTH = 6, 9
CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
NO_KL = {"reference_policy_kl_penalty": 0.0}


def random_data(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns rows of different lengths, with ratios from 0.3 to 3 and advantages of both signs, one per row."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 4, 7, 1, 9, 5])
    mask = (torch.arange(WIDTH)[None] < lengths[:, None]).double()
    old = -2 - torch.rand(ROWS, WIDTH, generator=draw).double()
    logprobs = (old + 0.6 * torch.randn(ROWS, WIDTH, generator=draw).double()).requires_grad_()
    advantages = torch.randn(ROWS, 1, generator=draw).double().expand(ROWS, WIDTH)
    data = {
        "loss_mask": mask,
        "prev_logprobs": old,
        "generation_logprobs": old + 0.1 * torch.randn(ROWS, WIDTH, generator=draw).double(),
        "reference_logprobs": old + 0.5 * torch.randn(ROWS, WIDTH, generator=draw).double(),
        "advantages": advantages,
    }
    return logprobs, data | row_sums(data)


BOUND = 0.01  # of a log-ratio: some sequences are above, some below


def ppo_clip(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Schulman et al. 2017, equation 7, as an objective to maximise."""
    ratio, advantage = (logprobs - data["prev_logprobs"]).exp(), data["advantages"]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def dual_clip(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Ye et al. 2020, equation 4, with c = 2."""
    objective, advantage = -ppo_clip(logprobs, data), data["advantages"]
    return -torch.where(advantage < 0, torch.maximum(objective, 2.0 * advantage), objective)


def gspo_sequence(logprobs: Tensor, data: dict[str, Tensor], bound: float | None = None) -> Tensor:
    """Zheng et al. 2025, equations 5 and 7: one ratio per sequence, with its whole gradient; a sequence's cost per token.

    As in verl, the sequence's log-ratio may have an upper bound, and no gradient above it.
    """
    mask = data["loss_mask"]
    length = mask.sum(1, keepdim=True)
    ratio = (((logprobs - data["prev_logprobs"]) * mask).sum(1, keepdim=True) / length).clamp(max=bound or math.inf).exp()
    advantage = (data["advantages"] * mask).sum(1, keepdim=True) / length  # equal on all tokens of the loss
    cost = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return cost.expand(mask.shape)


def cispo_weighted(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """MiniMax-M1, equation 4: the clipped ratio is a constant weight."""
    weight = (logprobs.detach() - data["prev_logprobs"]).exp().clamp(0.8, 1.28)
    return -weight * data["advantages"] * logprobs


def reinforce_plain(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    return -data["advantages"] * logprobs


def reverse_kl(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Lu et al. 2025: importance-weighted policy gradient, with minus the sampled reverse KL as each token's advantage."""
    advantage = -(data["prev_logprobs"] - data["reference_logprobs"])
    return -advantage * (logprobs - data["prev_logprobs"]).exp()


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Tensor, dict[str, Tensor]], Tensor]]] = {
    "grpo": ({"name": "grpo"}, ppo_clip),
    "dual clip": ({"name": "grpo", "ratio_clip_c": 2.0}, dual_clip),
    "gspo": ({"name": "gspo"}, gspo_sequence),
    "gspo bounded": ({"name": "gspo", "sequence_log_ratio_clamp": BOUND}, partial(gspo_sequence, bound=BOUND)),
    "cispo": ({"name": "cispo"}, cispo_weighted),
    "reinforce": ({"name": "reinforce"}, reinforce_plain),
    "distill": ({"name": "distill"}, reverse_kl),
}


def token_mean(cost: Tensor, mask: Tensor) -> Tensor:
    return (cost * mask).sum() / mask.sum()


def sequence_mean(cost: Tensor, mask: Tensor) -> Tensor:
    return ((cost * mask).sum(1) / mask.sum(1)).mean()


def constant_length(cost: Tensor, mask: Tensor) -> Tensor:
    """Dr.GRPO: Liu et al. 2025, section 3.2, with a generation limit of 12."""
    return (cost * mask).sum() / (12 * ROWS)


MEANS = {
    "token": ({}, token_mean),
    "sequence": ({"token_level_loss": False}, sequence_mean),
    "Dr.GRPO": ({"token_level_loss": False, "sequence_length_divisor": 12}, constant_length),
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_gradients_are_those_of_the_formula(name: str, mean: str) -> None:
    options, formula = FORMULAS[name]
    normalisation, average = MEANS[mean]
    logprobs, data = random_data()
    config = LossConfig(**CLIP, **NO_KL, **options, **normalisation)
    mask = data["loss_mask"]
    output = LOSSES["policy"](logprobs, data, config, Denominators(float(mask.sum()), float(ROWS)))
    (actual,) = torch.autograd.grad(output.loss, logprobs)
    expected = average(formula(logprobs, data), mask)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(actual * mask, gradient * mask, atol=1e-12, rtol=1e-12)
    assert actual.abs().max() > 0.001


def test_distillation_has_the_gradient_of_the_reverse_kl() -> None:
    """Every token of a vocabulary as a sample, weighted by its probability: the expectation is exact."""
    draw = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 7, generator=draw).double()
    logits.requires_grad_()
    policy, target = logits.log_softmax(0), teacher.log_softmax(0)
    mask, old = torch.ones(1, 7).double(), policy.detach()[None]
    columns = {"prev_logprobs": old, "reference_logprobs": target[None]}
    batch = TokenBatch(policy[None], mask, columns)
    cost, means = evaluate(token_loss(LossConfig(name="distill")), batch, "distill")
    (actual,) = torch.autograd.grad((cost * old.exp()).sum(), logits, retain_graph=True)
    divergence = (policy.exp() * (policy - target)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(actual, gradient, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close((means["policy/reverse_kl"] * old.exp()).sum(), divergence.detach())


def test_distillation_needs_a_reference_policy() -> None:
    try_loss_of(LossConfig(name="distill"))
    with pytest.raises(ConfigError, match=r"policy\.reference_model_name"):
        try_loss_of(LossConfig(name="distill", **NO_KL))


def test_clip_metrics_count_tokens_whose_cost_the_clip_changed() -> None:
    logprobs, data = random_data()
    mask = data["loss_mask"]
    output = LOSSES["policy"](logprobs, data, LossConfig(**CLIP, **NO_KL), Denominators(float(mask.sum()), float(ROWS)))
    ratio = (logprobs - data["prev_logprobs"]).exp()
    acted = ((data["advantages"] > 0) & (ratio > 1.28)) | ((data["advantages"] < 0) & (ratio < 0.8))
    expected = float((acted * mask).sum() / mask.sum())
    assert float(output.sums["policy/clip_ratio"]) == pytest.approx(expected) and 0.1 < expected < 0.9


def test_sequence_means_do_not_depend_on_how_sequences_are_packed() -> None:
    values, mask = torch.randn(2, 6), torch.tensor([[1.0, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1]])
    ids = torch.tensor([[4, 4, 4, 1, 1, 1], [0, 0, 2, 2, 2, 2]])
    batch = TokenBatch(values, mask, {}, sequences=Sequences(ids, 5))
    means = batch.sequence_mean(values)
    for sequence in (0, 1, 2, 4):
        inside = ids == sequence
        within = values[inside & (mask > 0)]
        torch.testing.assert_close(means[inside], within.mean().expand(int(inside.sum())))
    rows = TokenBatch(values, mask, {}).sequence_mean(values)
    torch.testing.assert_close(rows, ((values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).expand(2, 6))


def test_log_ratios_are_clamped_so_that_one_token_cannot_overflow() -> None:
    logprobs, data = random_data()
    data["prev_logprobs"] = data["prev_logprobs"].clone()
    data["prev_logprobs"][0, 0] = -900.0
    denominators = Denominators(float(data["loss_mask"].sum()), float(ROWS))
    clamped = LOSSES["policy"](logprobs, data, LossConfig(name="grpo", **NO_KL), denominators)
    free = LOSSES["policy"](logprobs, data, LossConfig(name="grpo", log_ratio_clamp=None, **NO_KL), denominators)
    assert torch.isfinite(clamped.maxima["max_probs_ratio"]) and not torch.isfinite(free.maxima["max_probs_ratio"])
    assert float(clamped.maxima["max_probs_ratio"]) == pytest.approx(float(torch.tensor(20.0).double().exp()))


def test_the_kl_penalty_of_a_token_is_clamped() -> None:
    """k3 of a token whose log-probability is 9 below the reference's: exp(9) - 1 - 9."""
    logprobs, data = random_data()
    mask = torch.zeros_like(data["loss_mask"])
    mask[0, 0] = 1
    data |= {"loss_mask": mask, "reference_logprobs": logprobs.detach() + 9}
    options = {"reference_policy_kl_penalty": 0.1}
    clamped = LOSSES["policy"](logprobs, data, LossConfig(**options), Denominators(1.0, 1.0))
    free = LOSSES["policy"](logprobs, data, LossConfig(kl_output_clamp_value=None, **options), Denominators(1.0, 1.0))
    assert float(clamped.sums["policy/kl"]) == 10.0
    assert float(free.sums["policy/kl"]) == pytest.approx(float(torch.tensor(9.0).double().exp()) - 10)


def test_sequences_are_judged_by_the_product_of_their_ratios_as_in_trl() -> None:
    logprobs, data = random_data()
    mask = data["loss_mask"]
    judged = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8}
    options: dict[str, Any] = {"use_importance_sampling_correction": True, **judged, **NO_KL, "name": "reinforce"}
    config = LossConfig(truncated_importance_sampling_type="seq-product-mask-tis", **options)
    output = LOSSES["policy"](logprobs, data, config, Denominators(float(mask.sum()), float(ROWS)))
    log_ratio = (data["prev_logprobs"] - data["generation_logprobs"]) * mask
    product = log_ratio.sum(1, keepdim=True).exp()
    kept = ((product >= 0.8) & (product <= 1.2)).double()
    expected = (-data["advantages"] * logprobs * log_ratio.exp() * kept * mask).sum() / mask.sum()
    torch.testing.assert_close(output.loss, expected)
    assert 0 < kept.sum() < ROWS


def try_loss_of(loss_fn: LossConfig) -> None:
    try_loss(algorithm_of(config_of(loss_fn)))


def own(batch: TokenBatch, *, slope: float = 1.0) -> Tensor:
    """A user's loss."""
    return -slope * batch.advantages * torch.sigmoid(batch.log_ratio)


def constant(batch: TokenBatch) -> Tensor:
    return torch.zeros_like(batch.logprobs)


def failing(batch: TokenBatch) -> Tensor:
    raise KeyError("entropy")


def test_a_users_loss_is_called_with_its_arguments() -> None:
    logprobs, data = random_data()
    config = LossConfig(name=f"{__name__}:own", args={"slope": 3.0}, **NO_KL)
    try_loss_of(config)
    mask = data["loss_mask"]
    output = LOSSES["policy"](logprobs, data, config, Denominators(float(mask.sum()), float(ROWS)))
    cost = -3.0 * data["advantages"] * (logprobs - data["prev_logprobs"]).sigmoid()
    torch.testing.assert_close(output.loss, token_mean(cost, mask))


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("grop", {}, "expected: grpo, gspo, cispo, reinforce, distill, or the import path"),
        ("grpo", {"slope": 1}, "loss_fn.args: .*'slope'; grpo takes batch"),
        (f"{__name__}:own", {"slop": 1}, "loss_fn.args: .*'slop'; .* takes batch, "),
        (f"{__name__}:lost", {}, "has no 'lost'"),
        (f"{__name__}:constant", {}, "nothing would train"),
        (f"{__name__}:failing", {}, "raised KeyError: 'entropy'"),
    ],
)
def test_losses_that_cannot_train_are_rejected(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        try_loss_of(LossConfig(name=name, args=args))
