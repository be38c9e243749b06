"""TRL's own GRPO and RLOO losses are ours, in value and gradient, on packed and split random samples.

TRL computes its loss in a method of its trainers. Here it runs on a trainer without a model, with given log-probabilities.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import nanstd

from dagrl.rl.advantages import group_advantages
from tests.peers.formulas import ROWS, WIDTH, Samples, our_loss, random_samples
from tests.peers.test_verl_formulas import CLIP, assert_equal

LENGTH = 12


class OneProcess:
    """In place of TRL's accelerator: a run of one process."""

    num_processes = 1

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value


def trainer(kind: type, samples: Samples, **settings: Any) -> Any:
    """Returns a trainer of TRL that was not built: it has what its loss reads, and the given log-probabilities."""
    made = kind.__new__(kind)  # type: ignore[call-overload]
    arguments = {"use_bias_correction_kl": False, "delta": settings.pop("delta", None), "steps_per_generation": 1}
    usual = {
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": CLIP["ratio_clip_min"],
        "epsilon_high": CLIP["ratio_clip_max"],
        "loss_type": "bnpo",
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "max_completion_length": LENGTH,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(**arguments),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (samples.logprobs, torch.zeros(ROWS, WIDTH), None),
    }
    for name, value in {**usual, **settings}.items():
        setattr(made, name, value)
    return made


def trl_loss(samples: Samples, **settings: Any) -> Tensor:
    data, prompt = samples.data, torch.ones(ROWS, 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "completion_mask": data["loss_mask"],
        "advantages": data["advantages"][:, 0],
        "old_per_token_logps": data["prev_logprobs"],
        "ref_per_token_logps": data["reference_logprobs"],
        "num_items_in_batch": data["loss_mask"].sum(),
    }
    loss = trainer(GRPOTrainer, samples, **settings)._compute_loss(None, inputs)
    assert isinstance(loss, Tensor)
    return loss


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"token_level_loss": False}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "Dr.GRPO": ({"loss_type": "dr_grpo"}, {"token_level_loss": False, "sequence_length_divisor": LENGTH}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"name": "gspo", "token_level_loss": False}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, {"name": "cispo", "ratio_clip_min": 1.0}),
    "kl": ({"beta": 0.3}, {"reference_policy_kl_penalty": 0.3}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_grpo_losses(name: str, seed: int) -> None:
    """CISPO has no lower bound in TRL, and the key is the upper bound itself."""
    settings, keys = LOSSES[name]
    samples = random_samples(seed)
    assert_equal(samples, our_loss(samples, **{**CLIP, **keys}), trl_loss(samples, **settings))


def test_a_two_sided_clip_differs_for_positive_advantages() -> None:
    """TRL's `delta` bounds the ratio for both signs; the dual clip here and in verl only that of negative advantages."""
    samples = random_samples(2)
    negative = samples.data["advantages"].abs().neg()
    ours = Samples(samples.logprobs, {**samples.data, "advantages": negative})
    assert_equal(ours, our_loss(ours, **CLIP, ratio_clip_c=2.0), trl_loss(ours, delta=2.0))


def test_rows_without_a_token_count_in_a_sequence_mean_of_trl_alone() -> None:
    samples = random_samples(3)
    mask = samples.mask.clone()
    mask[:4] = 0
    data = {**samples.data, "loss_mask": mask}
    some = Samples(samples.logprobs, data)
    ours, theirs = our_loss(some, **CLIP, token_level_loss=False), trl_loss(some, loss_type="grpo")
    assert theirs.item() == pytest.approx(ours.item() * (ROWS - 4) / ROWS, rel=1e-6)


def test_rloo_has_the_gradient_of_reinforce_on_the_policys_own_samples() -> None:
    """TRL's RLOO clips the ratio of whole sequences, which is 1 on policy: the gradient is that of REINFORCE."""
    samples = random_samples(4)
    data = samples.data
    old = (samples.logprobs.detach() * samples.mask).sum(1)
    inputs = {
        "prompt_ids": torch.ones(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "completion_mask": data["loss_mask"],
        "advantages": data["advantages"][:, 0],
        "old_logps": old,
    }
    theirs = trainer(RLOOTrainer, samples)._compute_loss(None, inputs)
    ours = our_loss(samples, name="reinforce", token_level_loss=False, sequence_length_divisor=1)
    torch.testing.assert_close(samples.gradient(ours), samples.gradient(theirs), atol=1e-6, rtol=0)


def test_the_deviation_of_a_group_is_the_sample_one() -> None:
    """TRL's `nanstd`; its epsilon is larger."""
    rewards = torch.tensor(np.random.default_rng(5).normal(size=(5, 6)))
    theirs = (rewards - rewards.mean(1, keepdim=True)) / (nanstd(rewards, dim=1)[:, None] + 1e-6)
    ours = group_advantages(rewards.numpy(), leave_one_out=False, normalize=True)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-9)
