"""TRL's own DPO, KTO and reward losses are ours, in value and gradient by the answers' log-probabilities or scores.

TRL computes its losses in methods of its trainers. Here they run on trainers that were not built, with given outputs.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer

from dagrl.config import Config
from dagrl.examples.kto import Kto
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.preferences import PairLosses, PreferenceAlgorithm, pair_losses

PAIRS, WIDTH, BETA = 4, 9, 0.3
LENGTHS = np.array([8, 3, 5, 7, 2, 4, 6, 1])  # of the answers: chosen and rejected in turn
ORDER = np.concatenate([np.arange(0, 2 * PAIRS, 2), np.arange(1, 2 * PAIRS, 2)])  # TRL's: chosen, then rejected
MASK = torch.tensor(np.arange(WIDTH)[None] < LENGTHS[ORDER][:, None])


class OneProcess:
    """In place of TRL's accelerator: a run of one process."""

    device = torch.device("cpu")

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather


class Outputs(SimpleNamespace):
    """What TRL's fused head returns for each token after the first: log-probabilities, and what it only records."""

    @staticmethod
    def of(logprobs: Tensor) -> Outputs:
        rest = torch.zeros_like(logprobs.detach())
        return Outputs(log_probs=logprobs, entropy=rest, mean_logits=rest, is_top1=rest.bool(), log_sum_sq_probs=rest)


def trainer(kind: type, **settings: Any) -> Any:
    made = kind.__new__(kind)  # type: ignore[call-overload]
    usual = {
        "accelerator": OneProcess(),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in {**usual, **settings}.items():
        setattr(made, name, value)
    return made


def random_logprobs(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = -3 * torch.rand(2 * PAIRS, WIDTH, generator=draw)
    return torch.where(MASK, values, 0.0)


def trl_dpo(logprobs: Tensor, reference: Tensor, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Runs `DPOTrainer._compute_loss` on given log-probabilities [answers, tokens]."""
    usual: dict[str, Any] = {
        "beta": BETA,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "model": SimpleNamespace(training=True),
    }
    made = trainer(DPOTrainer, **{**usual, **settings})
    fixed = reference.sum(1)
    completion = torch.nn.functional.pad(MASK.long(), (1, 0))  # the first token belongs to the prompt
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": fixed[:PAIRS],
        "ref_rejected_logps": fixed[PAIRS:],
    }
    loss = made._compute_loss(lambda **_: Outputs.of(logprobs), inputs, False)
    return loss, {name: values[0] for name, values in made._metrics["train"].items()}


def ours(algorithm: str, sums: Tensor, reference: Tensor | None = None, **preference: Any) -> PairLosses:
    """Our loss of TRL's rows, whose weights are in TRL's order."""
    sections = {"policy": {}, "data": {}, "preference": preference}
    made = algorithm_of(Config.model_validate({"name": "t", "algorithm": algorithm, **sections}))
    assert isinstance(made, PreferenceAlgorithm)
    back = np.argsort(ORDER)
    fixed = None if reference is None else reference.sum(1).double().numpy()[back]
    found = pair_losses(made, sums.detach().double().numpy()[back], LENGTHS, fixed)
    return PairLosses(found.weights[ORDER], found.metrics)


def test_dpo_is_trl_s() -> None:
    logprobs, reference = random_logprobs(1).requires_grad_(), random_logprobs(2)
    loss, metrics = trl_dpo(logprobs, reference)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    found = ours("dpo", logprobs.sum(1), reference, beta=BETA)
    assert found.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    weights = torch.tensor(found.weights, dtype=torch.float32)[:, None] * MASK
    torch.testing.assert_close(weights, gradient * MASK, atol=1e-6, rtol=0)
    for own, theirs in {"accuracy": "accuracies", "margin": "margins", "chosen_reward": "chosen"}.items():
        assert found.metrics[f"preference/{own}"] == pytest.approx(metrics[f"rewards/{theirs}"], abs=1e-6)


def test_the_kto_example_is_trl_s() -> None:
    """Rows of TRL are answers; those that estimate its KL are given apart."""
    logprobs, reference = random_logprobs(1).requires_grad_(), random_logprobs(2)
    labels, completion = torch.tensor([True, False, False, True]), torch.nn.functional.pad(MASK.long(), (1, 0))
    settings = {"undesirable_weight": 1.5, "desirable_weight": 1.0, "calculate_KL": True, "loss_type": "kto", "beta": BETA}
    made = trainer(
        KTOTrainer, **settings, model=SimpleNamespace(training=True), aux_loss_enabled=False, precompute_ref_logps=True
    )
    inputs = {"label": labels}
    for prefix, rows in (("", slice(PAIRS)), ("KL_", slice(PAIRS, None))):
        inputs[f"{prefix}input_ids"] = torch.zeros_like(completion[rows])
        inputs[f"{prefix}attention_mask"] = torch.ones_like(completion[rows])
        inputs[f"{prefix}completion_mask"] = completion[rows]
        inputs[f"ref_{prefix}logps"] = reference[rows].sum(1)
    outputs = iter([logprobs[PAIRS:], logprobs[:PAIRS]])  # in the order of TRL's passes
    loss = made._compute_loss(lambda **_: Outputs.of(next(outputs)), inputs, False)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    config = Config.model_validate(
        {
            "name": "t",
            "algorithm": "dagrl.examples.kto:Kto",
            "loss_fn": {"args": {"undesirable_weight": 1.5}},
            **{"policy": {}, "data": {}, "preference": {"beta": BETA}},
        }
    )
    back = np.argsort(ORDER)
    sums, fixed = (values.detach().sum(1).double().numpy()[back] for values in (logprobs, reference))
    found = pair_losses(Kto(config), sums, LENGTHS, fixed, labels.double().numpy())
    assert found.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    weights = torch.tensor(found.weights[ORDER], dtype=torch.float32)[:, None] * MASK
    torch.testing.assert_close(weights, gradient * MASK, atol=1e-6, rtol=0)


def test_the_reward_loss_is_trl_s() -> None:
    scores = random_logprobs(3)[:, 0].clone().requires_grad_()
    settings = {"args": SimpleNamespace(center_rewards_coefficient=None)}
    made = trainer(RewardTrainer, model=SimpleNamespace(training=True), **settings)

    class Model(torch.nn.Module):
        def forward(self, **_: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=scores[:, None])

    loss = made.compute_loss(Model(), {"attention_mask": torch.ones(2 * PAIRS, 2)})
    (gradient,) = torch.autograd.grad(loss, scores)
    found = ours("reward_model", scores)
    assert found.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(found.weights, gradient.numpy(), atol=1e-6)
    assert found.metrics["preference/accuracy"] == pytest.approx(made._metrics["train"]["accuracy"][0])
