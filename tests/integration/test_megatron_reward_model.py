"""A reward model in parallel layouts and packed: scores, loss and gradients of transformers' classifier, TRL's formula.

DPO's steps are those of plain torch in whole runs (`test_preferences.py`); their loss is one of tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.preferences import PreferenceAlgorithm, pair_losses
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, shard_batches, train
from tests.unit.rl.test_preferences import FORMULAS, Formula

CASES = [
    pytest.param(ParallelLayout(dp=2), {}, id="dp2"),
    pytest.param(ParallelLayout(cp=2), PACKED, id="cp2-packed"),
    pytest.param(ParallelLayout(tp=2, pp=2), PACKED, id="tp2pp2-packed", marks=pytest.mark.slow),
]
ORDER = np.concatenate([np.arange(0, reference.ROWS, 2), np.arange(1, reference.ROWS, 2)])  # TRL's: chosen, then rejected


def answer_sums(group: Group, batch: Batch) -> npt.NDArray[np.float64]:
    shards, rows = shard_batches(batch, group.layout), split_rows(batch["lengths"], group.layout.dp)
    places = [group.layout.coordinates(rank).dp for rank in range(group.layout.world_size)]
    parts = group.call("answer_sums", per_rank=[(shards[place], "policy") for place in places])
    sums = np.zeros(batch.rows)
    for shard, positions in enumerate(rows):
        (part,) = [part for place, part in zip(places, parts, strict=True) if place == shard and part is not None]
        sums[positions] = part["sums"][: len(positions)]
    return sums


def scored_batch() -> Batch:
    """Rows whose score is read before their last token, which nothing sees."""
    batch = reference.make_batch()
    mask = np.arange(batch.tokens)[None] == batch["lengths"][:, None] - 1
    counts = {"global_valid_tokens": float(batch.rows), "global_valid_sequences": float(batch.rows)}
    return batch.with_fields(loss_mask=mask.astype(np.float32)).with_scalars(**counts)


def classifier(directory: Path, head: Any, batch: Batch, formula: Formula) -> tuple[Any, float, dict[str, Any]]:
    """Returns scores, loss and gradients of transformers' own sequence classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.copy_(torch.tensor(head))
    rows = zip(batch["tokens"], batch["lengths"].tolist(), strict=True)
    scores = torch.cat([model(torch.tensor(tokens[: length - 1])[None]).logits[:, 0] for tokens, length in rows])
    loss = formula(scores[ORDER], torch.zeros(batch.rows), torch.ones(batch.rows))
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return scores.detach().numpy(), loss.item(), gradients


@pytest.mark.parametrize(("layout", "packing"), CASES)
def test_a_reward_model_is_transformers_classifier(
    layout: ParallelLayout, packing: dict[str, Any], megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    own = reference.make_config(tiny_models["qwen3"], train_micro_batch_size=2, **packing, optimizer=UNCLIPPED)
    config, formula = FORMULAS["reward"]
    batch, algorithm = scored_batch(), algorithm_of(config)
    assert isinstance(algorithm, PreferenceAlgorithm)
    with megatron_pool.group(layout, own.model_copy(update={"algorithm": "reward_model"}), kind="value") as group:
        head = reference.assemble(group.call("weights"))["score.weight"]
        found = answer_sums(group, batch)
        losses = pair_losses(algorithm, found, np.ones(batch.rows, np.int64), None)
        weights = (losses.weights * batch.rows).astype(np.float32)
        train(group, batch.with_fields(answer_weights=weights), "policy", warmup="whole")
        gradients = reference.assemble(group.call("gradients"))
    scores, loss, expected = classifier(tiny_models["qwen3"], head, batch, formula)
    np.testing.assert_allclose(found, scores, atol=1e-6)
    assert np.ptp(scores) > 0.1 and losses.metrics["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-6)
    reference.assert_gradients(gradients, expected, 2e-5)
