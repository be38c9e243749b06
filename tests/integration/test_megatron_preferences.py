"""Preferences in parallel layouts and packed: loss and gradients of a Hugging Face model with TRL's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dagrl.config import Config
from dagrl.rl.algorithm import algorithm_of
from dagrl.rl.preferences import PreferenceAlgorithm, pair_losses
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from dagrl.runtime.split import split_rows
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, shard_batches, train
from tests.unit.rl.test_preferences import BETA, FORMULAS

LAYOUTS = {
    "dp2": (ParallelLayout(dp=2), {}),
    "tp2pp2-packed": (ParallelLayout(tp=2, pp=2), PACKED),
    "cp2-packed": (ParallelLayout(cp=2), PACKED),
}
ORDER = np.concatenate([np.arange(0, reference.ROWS, 2), np.arange(1, reference.ROWS, 2)])  # TRL's: chosen, then rejected


CASES = ["dp2", "cp2-packed", pytest.param("tp2pp2-packed", marks=pytest.mark.slow)]
"""Layouts; in CI without the one whose parts other losses have there."""


@pytest.fixture(scope="module", params=CASES)
def group(request: pytest.FixtureRequest, megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> Iterator[Group]:
    layout, packing = LAYOUTS[request.param]
    config = reference.make_config(tiny_models["qwen3"], train_micro_batch_size=2, **packing, optimizer=UNCLIPPED)
    with megatron_pool.group(layout, config.model_copy(update={"algorithm": "dpo"})) as group:
        group.call("snapshot_reference")
        yield group


def pair_batch() -> Batch:
    """Pairs of rows of very different lengths; every row has tokens in the loss, as in data."""
    batch = reference.make_batch()
    mask = batch["loss_mask"].copy()
    mask[:, 1] = batch["lengths"] > 1
    counts = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(len(mask))}
    return batch.with_fields(loss_mask=mask).with_scalars(**counts)


def answer_sums(group: Group, batch: Batch, model: str) -> npt.NDArray[np.float64]:
    shards, rows = shard_batches(batch, group.layout), split_rows(batch["lengths"], group.layout.dp)
    places = [group.layout.coordinates(rank).dp for rank in range(group.layout.world_size)]
    parts = group.call("answer_sums", per_rank=[(shards[place], model) for place in places])
    sums = np.zeros(batch.rows)
    for shard, positions in enumerate(rows):
        (part,) = [part for place, part in zip(places, parts, strict=True) if place == shard and part is not None]
        sums[positions] = part["sums"][: len(positions)]
    return sums


def expected_sums(model: Path, batch: Batch) -> npt.NDArray[np.float64]:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logprobs = reference.hf_logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), batch)[0]
    found: npt.NDArray[np.float64] = (logprobs.double() * torch.tensor(batch["loss_mask"])).sum(1).numpy()
    return found


def test_loss_and_gradients_match_one_process(group: Group, tiny_models: dict[str, Path]) -> None:
    config, formula = FORMULAS["sigmoid"]
    batch = pair_batch()
    tokens = batch["loss_mask"].sum(1)
    fixed = expected_sums(tiny_models["llama"], batch)  # another model's, so that no ratio is 1

    def loss(logprobs: Tensor, _: Batch) -> Tensor:
        sums = (logprobs * torch.tensor(batch["loss_mask"])).sum(1)[ORDER]
        return formula(sums, torch.tensor(fixed[ORDER], dtype=torch.float32), torch.tensor(tokens[ORDER]))

    plain: Config = reference.make_config(tiny_models["qwen3"], optimizer=UNCLIPPED)
    run = reference.train_reference(tiny_models["qwen3"], batch, plain, loss, steps=1)
    algorithm = algorithm_of(config)
    assert isinstance(algorithm, PreferenceAlgorithm)
    first = answer_sums(group, batch, "reference")
    np.testing.assert_allclose(first, expected_sums(tiny_models["qwen3"], batch), rtol=2e-6)
    losses = pair_losses(algorithm, answer_sums(group, batch, "policy"), tokens.astype(np.int64), fixed)
    assert losses.metrics["loss"] == pytest.approx(run.losses[0], rel=1e-6, abs=2e-6)
    weights = (losses.weights * batch.rows).astype(np.float32)
    assert np.abs(weights).min() > 1e-3 * BETA
    step: dict[str, Any] = train(group, batch.with_fields(answer_weights=weights), "policy", warmup="whole")  # no update
    assert step["valid_tokens"] == tokens.sum()
    reference.assert_gradients(reference.assemble(group.call("gradients")), run.gradients, 2e-5)
