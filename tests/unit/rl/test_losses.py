"""Losses compared with formulas written out token by token in plain Python, and over every split of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dagrl.config import LossConfig
from dagrl.errors import DataError
from dagrl.rl.losses import Denominators, LossOutput, kl_estimate, row_sums
from tests.unit.rl.losses_by_kind import LOSSES

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
    data |= row_sums(data)
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
    if tensor.shape[1] == 1:  # the sum of a row
        return [tensor, tensor]
    first, second, third, fourth = tensor.chunk(4, dim=1)
    return [torch.cat([first, fourth], dim=1), torch.cat([second, third], dim=1)]


SPLITS = {"one row": by_rows(1), "two rows": by_rows(2), "uneven": by_rows(4), "context parallel": by_tokens_in_cp_order}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize(
    "config",
    [
        LossConfig(reference_policy_kl_penalty=0.1, ratio_clip_max=0.3),
        LossConfig(reference_policy_kl_penalty=0.1, token_level_loss=False),
        CORRECTIONS["sequence masks"],
    ],
    ids=["token level", "sequence level", "sequence masks"],
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
