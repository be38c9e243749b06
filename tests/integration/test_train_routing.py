"""Router loss, load and replayed experts of both backends, against the papers' formulas on a Hugging Face model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from dagrl.rl.routed_experts import MISSING, ROUTED_EXPERTS, field_of
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import UNCLIPPED, Case, each, fsdp, gradients_of, logprobs, megatron, train
from tests.integration.train_pool import WorkerPool

BALANCE = 0.5  # large: a wrong share would show in every gradient
BALANCED, FULL = {"moe_aux_loss_coeff": BALANCE}, {"activation_checkpointing": "full"}


BALANCED_CASES = [
    megatron("qwen3_moe_mixed", dp=2, pp=2, ep=2, section=BALANCED),
    megatron("qwen3_moe", dp=2, cp=2, recomputed=True, section=BALANCED, slow=True),
    megatron("qwen3_moe", dp=2, tp=2, section=BALANCED),
    megatron("glm4_moe", dp=2, pp=2, ep=2, section=BALANCED, slow=True),  # sigmoids
    megatron("qwen3_moe", tp=2, ep=2, etp=1, packed=True),
    fsdp("qwen3_moe", dp=2, cp=2, section=BALANCED),
    fsdp("qwen3_moe", dp=2, section={**FULL, **BALANCED}, slow=True),
]


class Routers:
    """Hooks on the routers of a Hugging Face model: they keep logits, and replace the chosen experts by `forced` ones.

    `forced` are ids [rows, width, layers, top k], -1 where the model chooses.
    """

    def __init__(self, model: Any, batch: Batch, forced: Any = None) -> None:
        self.lengths, self.forced, self.top_k = batch["lengths"].tolist(), forced, model.config.num_experts_per_tok
        self.normalized = getattr(model.config, "norm_topk_prob", True)
        self.scale = getattr(model.config, "routed_scaling_factor", 1.0)
        self.sigmoids = model.config.model_type == "glm4_moe"
        self.logits: dict[int, list[Tensor]] = {}  # by layer, row after row: [tokens, experts]
        self.chosen: dict[int, list[Tensor]] = {}  # the same: [tokens, top k]
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                layer = int(name.split(".")[2])
                module.register_forward_hook(lambda _, __, output, layer=layer: self._routed(layer, output))

    def _routed(self, layer: int, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, chosen = output
        row = len(self.logits.setdefault(layer, []))
        self.logits[layer].append(logits)
        self.chosen.setdefault(layer, []).append(chosen)
        if self.forced is None:
            return output
        wanted = torch.tensor(self.forced[row, : self.lengths[row], layer])
        chosen = torch.where(wanted < 0, chosen, wanted)
        weights = (logits.sigmoid() if self.sigmoids else logits.softmax(-1)).gather(-1, chosen)
        return logits, self.scale * (weights / weights.sum(-1, keepdim=True) if self.normalized else weights), chosen

    def probabilities(self, logits: Tensor) -> Tensor:
        """p_ti [tokens, experts]; of sigmoids as in DeepSeek-V3 (arXiv:2412.19437), equation 19."""
        return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if self.sigmoids else logits.softmax(-1)


def share_of(chosen: Sequence[Tensor], experts: int) -> Tensor:
    """f_i of GShard and Switch: the share of the chosen experts of these tokens that are i."""
    return torch.bincount(torch.cat([part.flatten() for part in chosen]), minlength=experts) / sum(map(Tensor.numel, chosen))


def loss_of(routers: Routers, batch: Batch, dp: int) -> Tensor:
    """Returns the load-balancing loss, the sum over layers: E sum_i f_i P_i, weighted by the tokens of microbatches.

    The tests' microbatches are of two rows of a shard.
    """
    shards = [rows.tolist() for rows in split_rows(batch["lengths"], dp)]
    balance, total = torch.zeros(()), sum(routers.lengths)
    for logits in routers.logits.values():
        for rows in [shard[start : start + 2] for shard in shards for start in range(0, len(shard), 2)]:
            best = [logits[row].topk(routers.top_k, -1).indices for row in rows]  # also where a bias chooses others
            shares = share_of(best, logits[0].shape[1])
            probabilities = torch.cat([routers.probabilities(logits[row]) for row in rows])
            balance = balance + len(shares) * (shares * probabilities.mean(0)).sum() * len(probabilities) / total
    return balance


def figures_of(routers: Routers) -> dict[str, float]:
    found: dict[str, list[float]] = {"max_load": [], "router_entropy": [], "unused_experts": []}
    for layer, logits in routers.logits.items():
        chosen, experts = routers.chosen[layer], logits[0].shape[1]
        whole = share_of(chosen, experts)
        found["max_load"].append(float(whole.max() * len(whole)))
        distribution = routers.probabilities(torch.cat(logits))
        found["router_entropy"].append((-(distribution * distribution.log()).sum(-1).mean()).item())
        found["unused_experts"].append(float((whole == 0).float().mean()))
    worst = max(found["max_load"])
    return {**{name: float(np.mean(values)) for name, values in found.items()}, "max_load_of_worst_layer": worst}


def check_close(found: Mapping[str, Any], model: Any, tolerance: float = 2e-5) -> None:
    """Compares gradients with those of a Hugging Face model."""
    expected = reference.gradients_of(model)
    assert set(found) == set(expected)
    reference.assert_gradients(found, expected, tolerance)


@each(BALANCED_CASES)
def test_loss_gradients_and_metrics_match_the_papers(case: Case, pool: WorkerPool) -> None:
    batch, model = reference.make_batch(), reference.load_model(pool.models[case.model])
    routers = Routers(model, batch)
    likelihood = reference.sft_reference(reference.hf_logprobs(model, batch)[0], batch)
    balance, weight = loss_of(routers, batch, case.sizes.get("dp", 1)), case.section.get("moe_aux_loss_coeff", 0.0)
    (likelihood + weight * balance).backward()
    with case.group(pool, optimizer=UNCLIPPED) as group:
        step = train(group, batch, warmup="whole")  # gradients, but no update
        gradients = gradients_of(group)
    expected = figures_of(routers) if case.backend == "megatron" else {}
    expected |= {"load_balancing_loss": balance.item() / len(routers.logits)} if weight else {}
    assert step["loss"] == pytest.approx(likelihood.item(), abs=1e-5)
    assert {key: step[f"moe/{key}"] for key in expected} == pytest.approx(expected, rel=1e-5)
    check_close(gradients, model)


def recorded_batch(batch: Batch, layers: int, experts: int, top_k: int, dense: int) -> tuple[Batch, Any]:
    """Returns the batch with random experts for most tokens, and their ids; a sequence's last tokens have no record."""
    generator = np.random.default_rng(5)
    ids = generator.random((batch.rows, batch.tokens, layers, experts)).argsort(-1)[..., :top_k]
    ids[generator.random(ids.shape[:2]) < 0.2] = -1
    ids[:, :, dense] = -1
    records = [
        np.where(row < 0, MISSING, row).astype(np.uint8).reshape(batch.tokens, -1)[: int(length) - 1]
        for row, length in zip(ids, batch["lengths"], strict=True)
    ]
    for row, length in zip(ids, batch["lengths"], strict=True):
        row[int(length) - 1 :] = -1
    return batch.with_fields(**{ROUTED_EXPERTS: field_of(records, batch.tokens)}), ids


REPLAYED = {  # with the number of the dense layer
    megatron("qwen3_moe_mixed", slow=True): 1,
    megatron("qwen3_moe_mixed", tp=2, cp=2, ep=2, etp=1, packed=True, recomputed=True): 1,
    megatron("glm4_moe", dp=2, pp=2, ep=2): 0,
    fsdp("qwen3_moe_mixed", section=FULL, dp=2, packed=True): 1,
    fsdp("qwen3_moe_mixed", tp=2, ep=2, slow=True): 1,
    fsdp("qwen3_moe_mixed", cp=2, packed=True, slow=True): 1,
}


@each(REPLAYED)
def test_replayed_experts_match_the_record(case: Case, pool: WorkerPool) -> None:
    """Log-probabilities and gradients of a model whose routers are made to choose the recorded experts."""
    plain = reference.make_batch()
    model, unforced = (reference.load_model(pool.models[case.model]) for _ in range(2))
    layers, experts = model.config.num_hidden_layers, model.config.num_local_experts
    batch, forced = recorded_batch(plain, layers, experts, 2, REPLAYED[case])
    Routers(model, plain, forced)
    expected = reference.hf_logprobs(model, plain)[0]
    reference.sft_reference(expected, plain).backward()
    own = reference.hf_logprobs(unforced, plain)[0]
    assert (expected - own).abs().max() > 0.1, "the record changes nothing"
    with case.group(pool, optimizer=UNCLIPPED, router_replay=True) as group:
        found = logprobs(group, batch)
        step = train(group, batch)
        gradients = gradients_of(group)  # FSDP keeps none after a step
        after = logprobs(group, batch)
    assert np.abs(after["logprobs"] - found["logprobs"]).max() > 1e-4
    np.testing.assert_allclose(found["logprobs"], expected.detach().numpy(), atol=1e-5, rtol=0)
    assert step["loss"] == pytest.approx(reference.sft_reference(expected, plain).item(), abs=1e-5)
    used = (forced[:, :, 2, 0] >= 0).sum() / plain["lengths"].sum()
    assert step["moe/replayed_tokens"] == pytest.approx(used)
    assert 0 < step["moe/replayed_agreement"] < 1
    norm = get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert step["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    if case.backend == "megatron":
        check_close(gradients, model)
