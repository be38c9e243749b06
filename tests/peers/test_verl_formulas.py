"""verl's own losses, advantages and KL estimates are ours, in value and gradient, on packed and split random samples.

What differs is in docs/algorithms.md, "Where peers differ", and is asserted here as a difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from dagrl.config import CriticConfig
from dagrl.rl.advantages import advantages_and_returns, batch_advantages, group_advantages, rewards_at_end, whitened
from dagrl.rl.algorithm import VALUE, algorithm_for
from dagrl.rl.losses import Denominators, batch_loss, importance_weights
from dagrl.rl.token_losses import TokenBatch
from dagrl.runtime.store import reserve_port
from tests.peers.formulas import GROUPS, ROWS, SIZE, WIDTH, Samples, configuration, context_part, our_loss, random_samples

CLIP = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}
UNBOUNDED = 1e9  # verl always has a dual clip
LENGTH = 12

LOSSES: dict[str, tuple[str, dict[str, Any], float]] = {
    "grpo": ("vanilla", {"name": "grpo"}, UNBOUNDED),
    "dual clip": ("vanilla", {"name": "grpo", "ratio_clip_c": 2.0}, 2.0),
    "gspo": ("gspo", {"name": "gspo"}, UNBOUNDED),
    "cispo": ("cispo", {"name": "cispo"}, UNBOUNDED),
}
MEANS: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "seq-mean-token-mean": {"token_level_loss": False},
    "seq-mean-token-sum-norm": {"token_level_loss": False, "sequence_length_divisor": LENGTH},
}


def actor(dual: float = UNBOUNDED) -> ActorConfig:
    clip = {"clip_ratio_low": CLIP["ratio_clip_min"], "clip_ratio_high": CLIP["ratio_clip_max"], "clip_ratio_c": dual}
    config = ActorConfig(strategy="fsdp", rollout_n=SIZE, ppo_micro_batch_size_per_gpu=1, **clip)
    config.global_batch_info["loss_scale_factor"] = LENGTH
    return config


def verl_loss(name: str, mean: str, samples: Samples, dual: float = UNBOUNDED, weights: Tensor | None = None) -> Tensor:
    data = samples.data
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=data["prev_logprobs"],
        log_prob=samples.logprobs,
        advantages=data["advantages"],
        response_mask=data["loss_mask"],
        loss_agg_mode=mean,
        config=actor(dual),
        rollout_is_weights=weights,
    )
    assert isinstance(loss, Tensor)
    return loss


def assert_equal(samples: Samples, ours: Tensor, theirs: Tensor) -> None:
    """Compares losses and gradients to 1e-6, of the largest gradient of a token."""
    found, expected = samples.gradient(ours), samples.gradient(theirs)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    scale = float(expected.abs().max())
    assert scale > 1e-4
    torch.testing.assert_close(found / scale, expected / scale, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name: str, mean: str, seed: int) -> None:
    theirs, keys, dual = LOSSES[name]
    samples = random_samples(seed)
    assert_equal(samples, our_loss(samples, **CLIP, **keys, **MEANS[mean]), verl_loss(theirs, mean, samples, dual))


def _context_worker(rank: int, address: str, directory: str) -> None:
    """One of two context-parallel workers. Writes its loss and gradient of each loss."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    for name, (_, keys, _) in LOSSES.items():
        samples = random_samples(3)
        loss = context_part(rank, dist.group.WORLD).loss(samples, {**CLIP, **keys, "token_level_loss": False})
        torch.save((loss.detach(), samples.gradient(loss)), Path(directory) / f"{name}-{rank}.pt")
    dist.destroy_process_group()


def test_policy_losses_over_context_parallel_workers(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_context_worker, (f"tcp://127.0.0.1:{reserve_port()}", str(tmp_path)), nprocs=2)
    for name, (theirs, _, dual) in LOSSES.items():
        samples = random_samples(3)
        expected = verl_loss(theirs, "seq-mean-token-mean", samples, dual)
        gradient = samples.gradient(expected)
        losses, gradients = zip(*(torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)), strict=True)
        assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6), name
        torch.testing.assert_close(sum(gradients), gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalties(kind: str) -> None:
    samples = random_samples(4)
    keys = {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": kind}
    estimate = core_algos.kl_penalty(samples.logprobs, samples.data["reference_logprobs"], kind)
    penalty = core_algos.agg_loss(estimate, samples.mask, "token-mean")
    assert_equal(samples, our_loss(samples, **CLIP, **keys), verl_loss("vanilla", "token-mean", samples) + 0.3 * penalty)


def test_clamps_of_outliers() -> None:
    """Log-ratios at 20, k3's input at 20 and its value at 10, as by default here; verl clamps neither k1 nor k2."""
    samples = random_samples(5, torch.float64)
    samples.data["prev_logprobs"][0, 0] -= 25
    samples.data["reference_logprobs"][1, 0] += 30
    keys = {"reference_policy_kl_penalty": 0.3}
    penalty = core_algos.agg_loss(
        core_algos.kl_penalty(samples.logprobs, samples.data["reference_logprobs"], "k3"), samples.mask, "token-mean"
    )
    theirs = verl_loss("vanilla", "token-mean", samples) + 0.3 * penalty
    ours = our_loss(samples, ratio_clip_min=0.2, ratio_clip_max=0.28, **keys)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
    torch.testing.assert_close(samples.gradient(ours), samples.gradient(theirs))
    for kind in ("k1", "k2"):
        gap = samples.logprobs.detach()[1, 0] - samples.data["reference_logprobs"][1, 0]
        estimate = core_algos.kl_penalty(samples.logprobs, samples.data["reference_logprobs"], kind)[1, 0]
        assert estimate.item() == pytest.approx((gap if kind == "k1" else gap**2 / 2).item())


@pytest.mark.parametrize("bounds", ["1.3", "0.8_1.3"])
def test_importance_weights(bounds: str) -> None:
    """TIS and IcePop."""
    samples = random_samples(6)
    gap = samples.data["prev_logprobs"] - samples.data["generation_logprobs"]
    weights, _ = compute_rollout_correction_weights(gap, samples.mask, "token", bounds)
    low, high = bounds.split("_") if "_" in bounds else (None, bounds)
    keys: dict[str, Any] = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis" if low is None else "icepop",
        "truncated_importance_sampling_ratio": float(high),
        "truncated_importance_sampling_ratio_min": None if low is None else float(low),
    }
    theirs = verl_loss("vanilla", "token-mean", samples, weights=weights)
    assert_equal(samples, our_loss(samples, **CLIP, **keys), theirs)


def test_sequences_that_are_masked() -> None:
    """verl bounds the inverse ratio, so bounds are given as each other's inverse. It also leaves masked tokens out of the
    mean's count; here they count."""
    samples = random_samples(7)
    data = samples.data
    config = configuration(
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.15,
        truncated_importance_sampling_ratio_min=1 / 1.15,
    )
    gap = data["prev_logprobs"] - data["generation_logprobs"]
    kept, _ = compute_rollout_rejection_mask(gap, samples.mask, "seq_mean_k1", f"{1 / 1.15}_{1.15}")
    ours = importance_weights(gap, TokenBatch(gap, samples.mask, data, config.loss_fn))
    torch.testing.assert_close(ours * samples.mask, gap.exp() * kept)
    assert 0 < float(kept.sum()) < float(samples.mask.sum())


def outcome(seed: int) -> tuple[np.ndarray[Any, Any], Tensor, Tensor, np.ndarray[Any, Any]]:
    """Rewards [GROUPS, SIZE]; the same at the last token of each row; the mask; the group of each row."""
    draw, mask = np.random.default_rng(seed), random_samples(seed).mask
    table = draw.normal(size=(GROUPS, SIZE))
    table[1] = [0, 0, 0, 1]
    table[2] = 0.5  # no variance
    rewards = torch.tensor(rewards_at_end(table.reshape(-1), mask.numpy()), dtype=torch.float32)
    return table, rewards, mask, np.repeat(np.arange(GROUPS), SIZE)


def of_rows(advantages: Tensor, mask: Tensor) -> np.ndarray[Any, Any]:
    """Returns the advantage of each row [GROUPS, SIZE], which verl repeats on its tokens."""
    first = advantages[:, 0]
    torch.testing.assert_close(advantages, first[:, None] * mask)
    return np.asarray(first.reshape(GROUPS, SIZE))


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_advantages(normalize: bool) -> None:
    table, rewards, mask, index = outcome(0)
    theirs, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=normalize)
    ours = group_advantages(table, leave_one_out=False, normalize=normalize)
    np.testing.assert_allclose(ours, of_rows(theirs, mask), atol=1e-6)
    assert not ours[2].any()


def test_rloo_advantages() -> None:
    table, rewards, mask, index = outcome(1)
    theirs, _ = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)
    ours = group_advantages(table, leave_one_out=True, normalize=False)
    np.testing.assert_allclose(ours, of_rows(theirs, mask), atol=1e-6)


def test_reinforce_plus_plus_advantages() -> None:
    """verl whitens over tokens, so long responses count more; here each response counts once. Equal lengths agree."""
    table, rewards, mask, index = outcome(2)
    ours = batch_advantages(table, np.ones_like(table))

    def theirs(rewards: Tensor, mask: Tensor) -> Any:
        return core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)[0]

    assert np.abs(ours - of_rows(theirs(rewards, mask), mask)).max() > 0.01
    full = torch.ones(ROWS, WIDTH)
    same = torch.tensor(rewards_at_end(table.reshape(-1), full.numpy()), dtype=torch.float32)
    freedom = np.sqrt((ROWS * WIDTH - 1) / (ROWS * WIDTH) * ROWS / (ROWS - 1))  # tokens, or responses, less one
    np.testing.assert_allclose(ours * freedom, of_rows(theirs(same, full), full), atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_generalized_advantages(gamma: float, lam: float) -> None:
    """With rewards at every token, such as those of a KL penalty."""
    _, rewards, mask, _ = outcome(3)
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(ROWS, WIDTH, generator=draw)
    data = random_samples(3).data
    tokens = core_algos.compute_rewards(rewards, data["prev_logprobs"], data["reference_logprobs"], 0.1)
    found, returns = advantages_and_returns(tokens, values, mask, gamma=gamma, lam=lam)
    theirs, their_returns = core_algos.compute_gae_advantage_return(tokens, values, mask, gamma, lam)
    np.testing.assert_allclose(whitened(found, mask), theirs * mask, atol=2e-6)
    np.testing.assert_allclose(returns, their_returns * mask, atol=2e-6)


@pytest.mark.parametrize("clip", [0.5, None])
def test_value_loss(clip: float | None) -> None:
    samples = random_samples(8)
    draw = torch.Generator().manual_seed(8)
    values, returns = torch.randn(2, ROWS, WIDTH, generator=draw)
    new = (values + 0.6 * torch.randn(ROWS, WIDTH, generator=draw)).requires_grad_()
    mask = samples.mask
    expected, share = core_algos.compute_value_loss(new, returns, values, mask, UNBOUNDED if clip is None else clip)
    ours, metrics = our_value_loss(new, {"values": values, "returns": returns, "loss_mask": mask}, clip)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["value_clip_ratio"].item() == pytest.approx(share.item(), abs=1e-6)
    (found,), (gradient,) = (torch.autograd.grad(loss, new) for loss in (ours, expected))
    torch.testing.assert_close(found, gradient, atol=1e-6, rtol=0)


def our_value_loss(values: Tensor, data: dict[str, Tensor], clip: float | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    config = configuration().model_copy(update={"critic": CriticConfig(value_clip=clip)})
    denominators = Denominators(float(data["loss_mask"].sum()), ROWS)
    output = batch_loss(algorithm_for(VALUE, config), values, data, denominators)
    return output.loss, output.sums
