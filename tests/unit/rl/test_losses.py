"""Losses compared with formulas written out token by token, of papers and peers, and over every split of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dagrl.config import LossConfig
from dagrl.errors import ConfigError, DataError
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.losses import Denominators, LossOutput, kl_estimate
from dagrl.rl.token_losses import Sequences, TokenBatch, evaluate, token_loss
from dagrl.rl.trial import try_loss
from tests.unit.rl.losses_by_kind import LOSSES, config_of

Data = dict[str, Tensor]
ROWS, TOKENS = 6, 8


def make_batch(seed: int = 0) -> tuple[Tensor, Data, Denominators]:
    """Returns a batch of ragged rows. The last row has no token in the loss, and padding has values that must not matter."""
    random = torch.Generator().manual_seed(seed)
    prev = -3 * torch.rand(ROWS, TOKENS, generator=random, dtype=torch.float64)
    noise = [0.4 * torch.randn(ROWS, TOKENS, generator=random, dtype=torch.float64) for _ in range(4)]
    mask = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    for row, (start, end) in enumerate([(1, 8), (2, 5), (3, 4), (1, 6), (4, 8), (0, 0)]):
        mask[row, start:end] = 1
    data = {
        "loss_mask": mask,
        "prev_logprobs": prev,
        "generation_logprobs": prev + noise[0],
        "reference_logprobs": prev + noise[1],
        "advantages": 2 * noise[2],
    }
    for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs", "advantages"):
        data[name] = torch.where(mask > 0, data[name], torch.full_like(data[name], float("nan")))
    logprobs = torch.where(mask > 0, prev + noise[3], torch.full_like(prev, -500.0)).requires_grad_()
    return logprobs, data, Denominators(float(mask.sum()), float((mask.sum(dim=1) > 0).sum()))


def written_out(logprobs: Tensor, data: Data, config: LossConfig, denominators: Denominators) -> dict[str, float]:
    """Computes the GRPO loss and its metrics token by token, from the papers, without tensors."""
    out = dict.fromkeys(
        (
            "policy_loss",
            "policy/kl",
            "policy/clip_ratio",
            "probs_ratio",
            "is_oob_ratio",
            "token_mult_prob_error",
            "gen_kl_error",
        ),
        0.0,
    )
    largest = 0.0
    for row in range(len(logprobs)):
        length = int(data["loss_mask"][row].sum())
        for token in range(logprobs.shape[1]):
            if not data["loss_mask"][row, token]:
                continue
            new, prev, generation, reference, advantage = (
                float(values[row, token])
                for values in (
                    logprobs,
                    data["prev_logprobs"],
                    data["generation_logprobs"],
                    data["reference_logprobs"],
                    data["advantages"],
                )
            )
            weight = 1 / denominators.tokens if config.token_level_loss else 1 / length / denominators.sequences
            ratio = math.exp(new) / math.exp(prev)
            clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
            objective = min(ratio * advantage, clipped * advantage)
            corrected = written_out_weight(prev, generation, geometric_mean(data, row), config)
            bounded = not math.isclose(corrected, math.exp(prev - generation), rel_tol=1e-12)
            out["is_oob_ratio"] += bounded / denominators.tokens
            if config.use_importance_sampling_correction:
                objective *= corrected
            out["policy_loss"] -= weight * objective
            out["policy/kl"] += (
                weight
                * {
                    "k1": math.log(math.exp(new) / math.exp(reference)),
                    "k2": 0.5 * math.log(math.exp(new) / math.exp(reference)) ** 2,
                    "k3": math.exp(reference) / math.exp(new) - math.log(math.exp(reference) / math.exp(new)) - 1,
                }[config.reference_policy_kl_type]
            )
            out["policy/clip_ratio"] += (clipped * advantage < ratio * advantage) / denominators.tokens
            out["probs_ratio"] += ratio / denominators.tokens
            out["token_mult_prob_error"] += math.exp(abs(generation - prev)) / denominators.tokens
            quotient = math.exp(prev) / math.exp(generation)
            out["gen_kl_error"] += (quotient - math.log(quotient) - 1) / denominators.tokens
            largest = max(largest, abs(generation - prev))
    loss = out["policy_loss"] + config.reference_policy_kl_penalty * out["policy/kl"]
    return {**out, "loss": loss, "max_logprob_difference": largest}


def geometric_mean(data: Data, row: int) -> float:
    """Returns the geometric mean of exp(prev) / exp(generation) over the tokens of a row in the loss."""
    tokens = [token for token in range(TOKENS) if data["loss_mask"][row, token]]
    ratios = [math.exp(data["prev_logprobs"][row, t]) / math.exp(data["generation_logprobs"][row, t]) for t in tokens]
    return math.prod(ratios) ** (1 / len(tokens))


def written_out_weight(prev: float, generation: float, mean: float, config: LossConfig) -> float:
    """Returns the importance weight of one token, from the definitions of its three bounds."""
    ratio = math.exp(prev) / math.exp(generation)
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return ratio
    if config.truncated_importance_sampling_type == "tis":
        return min(ratio, high)
    judged = ratio if config.truncated_importance_sampling_type == "icepop" else mean
    return ratio if low <= judged <= high else 0.0


CORRECTION = LossConfig(use_importance_sampling_correction=True)
CORRECTIONS = {
    "tis": CORRECTION.model_copy(update={"truncated_importance_sampling_ratio": 1.1}),
    "icepop": CORRECTION.model_copy(
        update={
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 1.3,
            "truncated_importance_sampling_ratio_min": 0.8,
        }
    ),
    "sequence masks": CORRECTION.model_copy(
        update={
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.1,
            "truncated_importance_sampling_ratio_min": 0.9,
            "token_level_loss": False,
        }
    ),
}
CONFIGS = {
    "grpo": LossConfig(),
    "clip higher": LossConfig(ratio_clip_min=0.1, ratio_clip_max=0.28, reference_policy_kl_penalty=0.5),
    "sequence level": LossConfig(token_level_loss=False, reference_policy_kl_penalty=0.3),
    "importance sampling": LossConfig(use_importance_sampling_correction=True),
    "k1": LossConfig(reference_policy_kl_type="k1", reference_policy_kl_penalty=0.2),
    "k2": LossConfig(reference_policy_kl_type="k2", reference_policy_kl_penalty=0.2),
    "k2 sequence level": LossConfig(reference_policy_kl_type="k2", reference_policy_kl_penalty=1.0, token_level_loss=False),
    **CORRECTIONS,
}
any_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@any_config
def test_grpo_equals_the_formula(config: LossConfig) -> None:
    logprobs, data, denominators = make_batch()
    output = LOSSES["policy"](logprobs, data, config, denominators)
    expected = written_out(logprobs.detach(), data, config, denominators)
    actual = {**output.sums, **output.maxima}
    for name, value in expected.items():
        assert float(actual[name]) == pytest.approx(value, abs=1e-12), name
    assert float(output.loss.detach()) == float(output.sums["loss"])
    assert 0 < expected["policy/clip_ratio"] < 1, "the batch must have clipped and unclipped tokens"
    if config in CORRECTIONS.values():
        assert 0 < expected["is_oob_ratio"] < 1, "and tokens on both sides of each bound"


@any_config
def test_gradient_is_the_numeric_gradient(config: LossConfig) -> None:
    logprobs, data, denominators = make_batch(seed=1)
    LOSSES["policy"](logprobs, data, config, denominators).loss.backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    step = 1e-6
    for row, token in data["loss_mask"].nonzero().tolist():
        moved = []
        for sign in (-1, 1):
            shifted = logprobs.detach().clone()
            shifted[row, token] += sign * step
            moved.append(written_out(shifted, data, config, denominators)["loss"])
        assert float(logprobs.grad[row, token]) == pytest.approx((moved[1] - moved[0]) / (2 * step), abs=1e-8)
    assert (logprobs.grad[data["loss_mask"] == 0] == 0).all()


@pytest.mark.parametrize("level", [True, False], ids=["tokens", "sequences"])
def test_forced_ratio_equals_an_unmoved_policy(level: bool) -> None:
    """Compares all sums and the gradient, without `prev_logprobs`."""
    options = {"token_level_loss": level, "use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.3}
    bound = {"truncated_importance_sampling_ratio": 1.1}
    logprobs, data, denominators = make_batch()
    unmoved = {**data, "prev_logprobs": logprobs.detach().clone()}
    expected = LOSSES["policy"](logprobs, unmoved, LossConfig(**options, **bound), denominators)
    (gradient,) = torch.autograd.grad(expected.loss, logprobs)
    del data["prev_logprobs"]
    forced = LossConfig(**options, **bound, force_on_policy_ratio=True)
    actual = LOSSES["policy"](logprobs, data, forced, denominators)
    (forced_gradient,) = torch.autograd.grad(actual.loss, logprobs)
    torch.testing.assert_close(forced_gradient, gradient, rtol=0, atol=0)
    assert actual.sums == expected.sums and actual.maxima == expected.maxima
    assert float(actual.sums["probs_ratio"]) == pytest.approx(1.0) and float(actual.sums["is_oob_ratio"]) > 0


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    logits = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = torch.arange(15).reshape(3, 5) % 7
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[..., None])[..., 0]
    output = LOSSES["likelihood"](logprobs, {"loss_mask": mask}, LossConfig(), Denominators(6.0, 2.0))
    targets = torch.where(mask > 0, tokens, -100)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert float(output.sums["valid_tokens"]) == 6


def by_rows(size: int) -> Callable[[Tensor], list[Tensor]]:
    return lambda tensor: list(tensor.split(size))


def by_tokens_in_cp_order(tensor: Tensor) -> list[Tensor]:
    """Returns Megatron's two context-parallel slices: rank 0 has chunks 0 and 3 of 4, rank 1 chunks 1 and 2."""
    first, second, third, fourth = tensor.chunk(4, dim=1)
    return [torch.cat([first, fourth], dim=1), torch.cat([second, third], dim=1)]


SPLITS = {"one row": by_rows(1), "two rows": by_rows(2), "uneven": by_rows(4)}
LEVELS = {
    "token level": LossConfig(reference_policy_kl_penalty=0.1, ratio_clip_max=0.3),
    "sequence level": LossConfig(reference_policy_kl_penalty=0.1, token_level_loss=False),
    "sequence masks": CORRECTIONS["sequence masks"],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("split", "config"),
    [
        *(
            pytest.param(split, config, id=f"{level}, {how}")
            for level, config in LEVELS.items()
            for how, split in SPLITS.items()
        ),
        pytest.param(by_tokens_in_cp_order, LEVELS["token level"], id="context parallel"),  # sequences need a group
    ],
)
def test_the_split_of_the_batch_does_not_matter(
    name: str, split: Callable[[Tensor], list[Tensor]], config: LossConfig
) -> None:
    logprobs, data, denominators = make_batch()
    weights = {key: value.float() for key, value in data.items()}
    whole = logprobs.detach().float().requires_grad_()
    expected = LOSSES[name](whole, weights, config, denominators)
    expected.loss.backward()

    leaf = logprobs.detach().float().requires_grad_()
    pieces = {key: split(value) for key, value in weights.items()}
    outputs: list[LossOutput] = []
    for index, part in enumerate(split(leaf)):
        outputs.append(LOSSES[name](part, {key: value[index] for key, value in pieces.items()}, config, denominators))
        outputs[-1].loss.backward(retain_graph=True)  # gradients add up in the leaf
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=0, atol=1e-6)
    for metric, value in expected.sums.items():
        total = sum(float(output.sums[metric]) for output in outputs)
        assert total == pytest.approx(float(value), abs=1e-6), metric
    for metric, value in expected.maxima.items():
        assert max(float(output.maxima[metric]) for output in outputs) == float(value), metric


def test_padding_cannot_overflow() -> None:
    """At padding, exp of the difference would be infinite, and infinity times a mask of 0 is NaN."""
    logprobs, data, denominators = make_batch()
    data["prev_logprobs"] = torch.where(data["loss_mask"] > 0, data["prev_logprobs"], torch.full_like(logprobs, -5000.0))
    output = LOSSES["policy"](logprobs, data, LossConfig(), denominators)
    output.loss.backward()
    assert all(torch.isfinite(value) for value in (*output.sums.values(), *output.maxima.values()))
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()


def test_no_penalty_needs_no_reference() -> None:
    logprobs, data, denominators = make_batch()
    for reference in (None, torch.full_like(data["reference_logprobs"], torch.nan)):
        data.pop("reference_logprobs", None)
        given = {} if reference is None else {"reference_logprobs": reference}
        output = LOSSES["policy"](logprobs, data | given, LossConfig(reference_policy_kl_penalty=0), denominators)
        assert "policy/kl" not in output.sums
        assert torch.isfinite(output.loss)


def test_a_batch_without_tokens_is_an_error() -> None:
    with pytest.raises(DataError, match="loss_mask"):
        Denominators(tokens=0.0, sequences=0.0)


def test_kl_estimates_average_to_the_kl_of_two_distributions() -> None:
    """k1 and k3 are unbiased: their expectation under the policy is the KL. k2 is biased, but close for similar policies."""
    policy = torch.log_softmax(torch.tensor([0.3, -0.2, 0.5, 0.0], dtype=torch.float64), dim=0)
    reference = torch.log_softmax(torch.tensor([0.2, -0.1, 0.4, 0.2], dtype=torch.float64), dim=0)
    exact = float(
        torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (policy, reference)))
    )
    expectation = {kind: float((policy.exp() * kl_estimate(policy, reference, kind)).sum()) for kind in ("k1", "k2", "k3")}
    assert expectation["k1"] == pytest.approx(exact, abs=1e-15)
    assert expectation["k3"] == pytest.approx(exact, abs=1e-15)
    assert expectation["k2"] == pytest.approx(exact, rel=0.1)
    assert (kl_estimate(policy, reference, "k3") >= 0).all()


SAMPLES, WIDTH = 6, 9
CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
NO_KL = {"reference_policy_kl_penalty": 0.0}


def random_data(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns rows of different lengths, with ratios from 0.3 to 3 and advantages of both signs, one per row."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 4, 7, 1, 9, 5])
    mask = (torch.arange(WIDTH)[None] < lengths[:, None]).double()
    old = -2 - torch.rand(SAMPLES, WIDTH, generator=draw).double()
    logprobs = (old + 0.6 * torch.randn(SAMPLES, WIDTH, generator=draw).double()).requires_grad_()
    advantages = torch.randn(SAMPLES, 1, generator=draw).double().expand(SAMPLES, WIDTH)
    data = {
        "loss_mask": mask,
        "prev_logprobs": old,
        "generation_logprobs": old + 0.1 * torch.randn(SAMPLES, WIDTH, generator=draw).double(),
        "reference_logprobs": old + 0.5 * torch.randn(SAMPLES, WIDTH, generator=draw).double(),
        "advantages": advantages,
    }
    return logprobs, data


def ppo_clip(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Schulman et al. 2017, equation 7, as an objective to maximise."""
    ratio, advantage = (logprobs - data["prev_logprobs"]).exp(), data["advantages"]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def dual_clip(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Ye et al. 2020, equation 4, with c = 2."""
    objective, advantage = -ppo_clip(logprobs, data), data["advantages"]
    return -torch.where(advantage < 0, torch.maximum(objective, 2.0 * advantage), objective)


def gspo_sequence(logprobs: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Zheng et al. 2025, equations 5 and 7: one ratio per sequence, with its whole gradient; a sequence's cost per token."""
    mask = data["loss_mask"]
    length = mask.sum(1, keepdim=True)
    ratio = (((logprobs - data["prev_logprobs"]) * mask).sum(1, keepdim=True) / length).exp()
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
    return (cost * mask).sum() / (12 * SAMPLES)


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
    output = LOSSES["policy"](logprobs, data, config, Denominators(float(mask.sum()), float(SAMPLES)))
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
    with pytest.raises(ConfigError, match=r"models\.teacher\.model_name"):
        try_loss_of(LossConfig(name="distill", **NO_KL))


def test_clip_metrics_count_tokens_whose_cost_the_clip_changed() -> None:
    logprobs, data = random_data()
    mask = data["loss_mask"]
    output = LOSSES["policy"](logprobs, data, LossConfig(**CLIP, **NO_KL), Denominators(float(mask.sum()), float(SAMPLES)))
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
    denominators = Denominators(float(data["loss_mask"].sum()), float(SAMPLES))
    clamped = LOSSES["policy"](logprobs, data, LossConfig(name="grpo", **NO_KL), denominators)
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
    output = LOSSES["policy"](logprobs, data, config, Denominators(float(mask.sum()), float(SAMPLES)))
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
