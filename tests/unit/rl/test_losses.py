"""Losses and minibatches compared with the formulas of papers and peers, and over every split of a batch."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config, LossConfig
from dagrl.errors import ConfigError, DataError
from dagrl.rl.algorithm import algorithm_for, algorithm_of
from dagrl.rl.losses import Denominators, LossOutput, batch_loss
from dagrl.rl.token_losses import Sequences, TokenBatch, evaluate, token_loss
from dagrl.rl.trial import try_loss
from dagrl.run.loops.policy_update import PolicyTrainer, collect_steps, split_minibatches
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics, join_optimizer_steps, merge_step_metrics


def config_of(loss_fn: LossConfig) -> Config:
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {}, "loss_fn": loss_fn})


def loss_of(kind: str, logprobs: Tensor, data: Any, loss_fn: LossConfig, denominators: Denominators) -> LossOutput:
    return batch_loss(algorithm_for(kind, config_of(loss_fn)), logprobs, data, denominators)


LOSSES = {kind: partial(loss_of, kind) for kind in ("policy", "likelihood")}
"""The losses that phases name, as functions of a `LossConfig`."""
Data = dict[str, Tensor]
Formula = Callable[[Tensor, Data], Tensor]
ROWS, TOKENS = 6, 8


def make_batch() -> tuple[Tensor, Data, Denominators]:
    """Returns a batch of ragged rows. The last row has no token in the loss, and padding has values that must not matter."""
    random = torch.Generator().manual_seed(4)
    prev = -3 * torch.rand(ROWS, TOKENS, generator=random, dtype=torch.float64)
    noise = [0.4 * torch.randn(ROWS, TOKENS, generator=random, dtype=torch.float64) for _ in range(4)]
    mask = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    for row, (start, end) in enumerate([(1, 8), (2, 5), (3, 4), (1, 6), (4, 8), (0, 0)]):
        mask[row, start:end] = 1
    data = {
        "loss_mask": mask,
        "prev_logprobs": prev,
        "generation_logprobs": prev - noise[0],
        "reference_logprobs": prev + noise[1],
        "advantages": 2 * noise[2][:, :1].repeat(1, TOKENS),
    }
    data["advantages"] *= mask  # as of all batches
    for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs"):
        data[name] = torch.where(mask > 0, data[name], torch.full_like(data[name], float("nan")))
    logprobs = torch.where(mask > 0, prev + noise[3], torch.full_like(prev, -500.0)).requires_grad_()
    return logprobs, data, Denominators(float(mask.sum()), float((mask.sum(dim=1) > 0).sum()))


def inside(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the values of tokens in the loss, and 0 for others, which may be NaN."""
    return torch.where(mask > 0, values, torch.zeros_like(values))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return inside(values, mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def ppo_clip(logprobs: Tensor, data: Data) -> Tensor:
    """Schulman et al. 2017, equation 7, as an objective to maximise."""
    ratio, advantage = (logprobs - data["prev_logprobs"]).exp(), data["advantages"]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


def dual_clip(logprobs: Tensor, data: Data) -> Tensor:
    """Ye et al. 2020, equation 4, with c = 1.4."""
    objective, advantage = -ppo_clip(logprobs, data), data["advantages"]
    return -torch.where(advantage < 0, torch.maximum(objective, 1.4 * advantage), objective)


def gspo_sequence(logprobs: Tensor, data: Data) -> Tensor:
    """Zheng et al. 2025, equations 5 and 7: one ratio per sequence, with its whole gradient; a sequence's cost per token."""
    ratio = row_mean(logprobs - data["prev_logprobs"], data["loss_mask"]).exp()
    advantage = row_mean(data["advantages"], data["loss_mask"])
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).expand_as(logprobs)


def cispo_weighted(logprobs: Tensor, data: Data) -> Tensor:
    """MiniMax-M1, equation 4: the clipped ratio is a constant weight."""
    weight = (logprobs.detach() - data["prev_logprobs"]).exp().clamp(0.8, 1.28)
    return -weight * data["advantages"] * logprobs


def reverse_kl(logprobs: Tensor, data: Data) -> Tensor:
    """Lu et al. 2025: importance-weighted policy gradient, with minus the sampled reverse KL as each token's advantage."""
    advantage = -(data["prev_logprobs"] - data["reference_logprobs"])
    return -advantage * (logprobs - data["prev_logprobs"]).exp()


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda over: over,
    "k2": lambda over: over**2 / 2,
    "k3": lambda over: (-over).exp() + over - 1,
}
"""Schulman 2020, from log-probabilities over those of the reference."""


def penalised(kind: str) -> Formula:
    return lambda logprobs, data: ppo_clip(logprobs, data) + 0.2 * KL[kind](logprobs - data["reference_logprobs"])


BOUNDS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": {"ratio": 1.1},
    "icepop": {"type": "icepop", "ratio": 1.3, "ratio_min": 0.8},
    "seq-mask-tis": {"type": "seq-mask-tis", "ratio": 1.1, "ratio_min": 0.9},
}


def corrected_by(kind: str) -> dict[str, Any]:
    bounds = {f"truncated_importance_sampling_{name}": value for name, value in BOUNDS[kind].items()}
    return {"use_importance_sampling_correction": True, **bounds}


def importance(data: Data, kind: str) -> Tensor:
    """Returns the weight of each token: its ratio, up to a bound, or 0 where it or its row's mean is out of bounds."""
    gap = data["prev_logprobs"] - data["generation_logprobs"]
    if kind in ("none", "tis"):
        return gap.exp().clamp(max=BOUNDS[kind].get("ratio", torch.inf))
    judged = (gap if kind == "icepop" else row_mean(gap, data["loss_mask"]).expand_as(gap)).exp()
    kept = (judged >= BOUNDS[kind]["ratio_min"]) & (judged <= BOUNDS[kind]["ratio"])
    return torch.where(kept, gap.exp(), torch.zeros_like(gap))


def corrected(kind: str) -> Formula:
    return lambda logprobs, data: importance(data, kind) * ppo_clip(logprobs, data)


FORMULAS: dict[str, tuple[dict[str, Any], Formula]] = {
    "grpo": ({"name": "grpo"}, ppo_clip),
    "dual clip": ({"name": "grpo", "ratio_clip_c": 1.4}, dual_clip),
    "gspo": ({"name": "gspo"}, gspo_sequence),
    "cispo": ({"name": "cispo"}, cispo_weighted),
    "reinforce": ({"name": "reinforce"}, lambda logprobs, data: -data["advantages"] * logprobs),
    "distill": ({"name": "distill"}, reverse_kl),
    **{kind: ({"reference_policy_kl_penalty": 0.2, "reference_policy_kl_type": kind}, penalised(kind)) for kind in KL},
    **{f"corrected by {kind}": (corrected_by(kind), corrected(kind)) for kind in BOUNDS},
}


def token_mean(cost: Tensor, mask: Tensor) -> Tensor:
    return inside(cost, mask).sum() / mask.sum()


def sequence_mean(cost: Tensor, mask: Tensor) -> Tensor:
    return row_mean(cost, mask).sum() / (mask.sum(1) > 0).sum()


def constant_length(cost: Tensor, mask: Tensor) -> Tensor:
    """Dr.GRPO: Liu et al. 2025, section 3.2, with a generation limit of 12."""
    return inside(cost, mask).sum() / (12 * (mask.sum(1) > 0).sum())


MEANS = {
    "token": ({}, token_mean),
    "sequence": ({"token_level_loss": False}, sequence_mean),
    "Dr.GRPO": ({"token_level_loss": False, "sequence_length_divisor": 12}, constant_length),
}
CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
NO_KL = {"reference_policy_kl_penalty": 0.0}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", FORMULAS)
def test_losses_and_gradients_are_those_of_the_formula(name: str, mean: str) -> None:
    options, formula = FORMULAS[name]
    normalisation, average = MEANS[mean]
    logprobs, data, denominators = make_batch()
    mask, config = data["loss_mask"], LossConfig(**{**CLIP, **NO_KL, **options, **normalisation})
    output = LOSSES["policy"](logprobs, data, config, denominators)
    (actual,) = torch.autograd.grad(output.loss, logprobs)
    expected = average(formula(logprobs, data), mask)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(output.loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(actual[mask > 0], gradient[mask > 0], atol=1e-12, rtol=1e-12)
    assert actual.abs().max() > 0.001 and (actual[mask == 0] == 0).all()


@pytest.mark.parametrize("mean", ["token", "sequence"])
@pytest.mark.parametrize("kind", BOUNDS)
def test_metrics_are_those_of_their_definitions(kind: str, mean: str) -> None:
    normalisation, average = MEANS[mean]
    logprobs, data, denominators = make_batch()
    output = LOSSES["policy"](logprobs, data, LossConfig(**CLIP, **corrected_by(kind), **normalisation), denominators)
    new, mask, advantage = logprobs.detach(), data["loss_mask"], data["advantages"]
    ratio, gap = (new - data["prev_logprobs"]).exp(), data["prev_logprobs"] - data["generation_logprobs"]
    acted = ((advantage > 0) & (ratio > 1.28)) | ((advantage < 0) & (ratio < 0.8))
    values = {
        "policy/clip_ratio": acted.double(),
        "probs_ratio": ratio,
        "token_mult_prob_error": gap.abs().exp(),
        "gen_kl_error": gap.exp() - gap - 1,
        "is_oob_ratio": (importance(data, kind) != gap.exp()).double(),
    }
    expected = {name: float(token_mean(value, mask)) for name, value in values.items()}
    expected["policy/kl"] = float(average(KL["k3"](new - data["reference_logprobs"]), mask))
    assert {name: float(output.sums[name]) for name in expected} == pytest.approx(expected, abs=1e-12)
    assert float(output.maxima["max_logprob_difference"]) == float(inside(gap.abs(), mask).max())
    assert 0 < expected["policy/clip_ratio"] < 1 and (kind == "none" or 0 < expected["is_oob_ratio"] < 1)


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
    with pytest.raises(DataError, match="loss_mask"):
        Denominators(tokens=0.0, sequences=0.0)


Split = Callable[[Tensor], list[Tensor]]


def by_rows(size: int) -> Split:
    return lambda tensor: list(tensor.split(size))


def by_tokens_in_cp_order(tensor: Tensor) -> list[Tensor]:
    """Returns Megatron's two context-parallel slices: rank 0 has chunks 0 and 3 of 4, rank 1 chunks 1 and 2."""
    first, second, third, fourth = tensor.chunk(4, dim=1)
    return [torch.cat([first, fourth], dim=1), torch.cat([second, third], dim=1)]


TOKEN_LEVEL = LossConfig(reference_policy_kl_penalty=0.1, ratio_clip_max=0.3)
SEQUENCE_LEVEL = LossConfig(reference_policy_kl_penalty=0.1, token_level_loss=False)
SEQUENCE_MASKS = LossConfig(token_level_loss=False, **corrected_by("seq-mask-tis"))
SPLITS = [*product(map(by_rows, (1, 2, 4)), (TOKEN_LEVEL, SEQUENCE_LEVEL, SEQUENCE_MASKS))]
SPLITS += [(by_tokens_in_cp_order, TOKEN_LEVEL)]  # sequences need a group


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("split", "config"), SPLITS)
def test_the_split_of_the_batch_does_not_matter(name: str, split: Split, config: LossConfig) -> None:
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


def test_no_penalty_needs_no_reference() -> None:
    logprobs, data, denominators = make_batch()
    reference = torch.full_like(data.pop("reference_logprobs"), torch.nan)
    for given in (data, data | {"reference_logprobs": reference}):
        output = LOSSES["policy"](logprobs, given, LossConfig(**NO_KL), denominators)
        assert "policy/kl" not in output.sums and torch.isfinite(output.loss)


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


def test_log_ratios_and_kl_penalties_are_clamped_so_that_one_token_cannot_overflow() -> None:
    """k3 of a token whose log-probability is 9 below the reference's: exp(9) - 1 - 9."""
    logprobs, data, _ = make_batch()
    mask, before = torch.zeros_like(data["loss_mask"]), data["prev_logprobs"].clone()
    mask[0, 1], before[0, 1] = 1, -900.0
    data |= {"loss_mask": mask, "prev_logprobs": before, "reference_logprobs": logprobs.detach() + 9}
    options = {"reference_policy_kl_penalty": 0.1}
    clamped = LOSSES["policy"](logprobs, data, LossConfig(**options), Denominators(1.0, 1.0))
    free = LOSSES["policy"](logprobs, data, LossConfig(kl_output_clamp_value=None, **options), Denominators(1.0, 1.0))
    assert float(clamped.maxima["max_probs_ratio"]) == pytest.approx(math.exp(20))
    assert float(clamped.sums["policy/kl"]) == 10.0 and float(free.sums["policy/kl"]) == pytest.approx(math.exp(9) - 10)


def try_loss_of(loss_fn: LossConfig) -> None:
    try_loss(algorithm_of(config_of(loss_fn)))


def own(batch: TokenBatch, *, slope: float = 1.0) -> Tensor:
    return -slope * batch.advantages * torch.sigmoid(batch.log_ratio)


def constant(batch: TokenBatch) -> Tensor:
    return torch.zeros_like(batch.logprobs)


def failing(batch: TokenBatch) -> Tensor:
    raise KeyError("entropy")


def test_a_users_loss_is_called_with_its_arguments() -> None:
    logprobs, data, denominators = make_batch()
    config = LossConfig(name=f"{__name__}:own", args={"slope": 3.0}, **NO_KL)
    try_loss_of(config)
    mask = data["loss_mask"]
    output = LOSSES["policy"](logprobs, data, config, denominators)
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


CONFIG = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {"train_global_batch_size": 4}})


def drawn_rows(rows: int, masked_rows: slice = slice(0)) -> Batch:
    """Returns rows with 1 to 9 tokens in the loss, so that minibatches have different weights."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(2, 11, rows)
    mask = (np.arange(10)[None] < lengths[:, None]).astype(np.float32)
    mask[:, 0] = mask[masked_rows] = 0
    names = ("generation_logprobs", "prev_logprobs", "reference_logprobs", "advantages")
    fields = {name: generator.normal(-1, 0.5, (rows, 10)).astype(np.float32) for name in names}
    return Batch({"tokens": np.zeros((rows, 10), np.int64), "lengths": lengths, "loss_mask": mask, **fields})


def take_step(batch: Batch) -> StepMetrics:
    """Returns the metrics of the real loss under a fixed policy; each step takes a second."""
    data = {name: torch.from_numpy(values) for name, values in batch.fields.items()}
    tokens, rows = float(batch["loss_mask"].sum()), float((batch["loss_mask"].sum(1) > 0).sum())
    logprobs = data["prev_logprobs"] + 0.3 * data["advantages"]
    output = LOSSES["policy"](logprobs, data, CONFIG.loss_fn, Denominators(tokens, rows))
    sums = {name: float(value) for name, value in output.sums.items()}
    maxima = {name: float(value) for name, value in output.maxima.items()} | {"perf/train_seconds": 1.0}
    figures = {"train_tokens": float(batch["lengths"].sum()), "train_tflop": 2.0, "train_ranks": 4.0}
    return merge_step_metrics([StepMetrics(sums | figures, maxima, {"grad_norm": tokens, "lr": tokens})])


def optimized(batch: Batch) -> tuple[dict[str, float], int]:
    submit = MagicMock(side_effect=lambda phase, minibatch, rows: minibatch)
    replays: Any = SimpleNamespace(submit=submit, collect=lambda phase, minibatch: ([take_step(minibatch)], None))
    parts: Any = dict.fromkeys(("plan", "train", "stop", "log", "thread"))
    trainer = PolicyTrainer(CONFIG, replays=replays, media=False, **parts)
    steps = trainer.submit_steps(batch, 1, split_minibatches(CONFIG, batch))
    assert {call.args[0] for call in submit.call_args_list} <= {"train_step"}
    return collect_steps(replays, steps, 1), submit.call_count


def test_metrics_are_those_of_the_whole_batch() -> None:
    batch = drawn_rows(12)
    actual, steps = optimized(batch)
    whole = take_step(batch).flat()
    tokens = [float(batch["loss_mask"][start : start + 4].sum()) for start in (0, 4, 8)]
    assert steps == 3 and len(set(tokens)) == 3
    figures = {name for name in whole if name.startswith("perf/")}
    for name in whole.keys() - figures - {"grad_norm", "lr"}:
        assert actual[name] == pytest.approx(whole[name], rel=1e-5), name
    assert (actual["grad_norm"], actual["lr"]) == (max(tokens), tokens[-1])
    assert actual["perf/train_seconds"] == 3.0
    assert actual["perf/policy_training_tokens_per_sec"] == pytest.approx(float(batch["lengths"].sum()) / 3)
    assert actual["perf/train_tflops_per_gpu"] == pytest.approx(3 * 2.0 / 3 / 4)


def test_nan_is_the_largest() -> None:
    """Over the minibatches of a step and over workers, in any order."""
    parts = [StepMetrics({"valid_tokens": 1.0}, {"max": value}, {"grad_norm": value}) for value in (0.7, math.nan, 0.2)]
    for order in (parts, parts[::-1]):
        joined = join_optimizer_steps(order)
        assert math.isnan(joined.shared["grad_norm"]) and math.isnan(merge_step_metrics(order).maxima["max"])


def test_minibatches_without_loss_are_skipped_and_counted() -> None:
    actual, steps = optimized(drawn_rows(12, slice(4, 8)))
    assert (steps, actual["masked_minibatches"]) == (2, 1)
    assert np.isfinite(list(actual.values())).all()
    assert optimized(drawn_rows(8, slice(0, 8))) == ({"masked_minibatches": 2.0}, 0)
