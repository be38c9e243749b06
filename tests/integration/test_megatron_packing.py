"""Packed sequences that share a prefix. `test_megatron_layouts` has those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import SequencePackingConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train

CASES = [
    ("qwen3_windows", ParallelLayout()),
    ("qwen3", ParallelLayout(dp=2, tp=2)),
    pytest.param("qwen3", ParallelLayout(pp=2, vpp=2), marks=pytest.mark.slow),
    pytest.param("deepseek_v3", ParallelLayout(tp=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda part: str(getattr(part, "world_size", part)))
def test_shared_prefixes_give_the_gradients_of_whole_sequences(
    model: str, layout: ParallelLayout, megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    """The truth is Hugging Face, one sequence at a time."""
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": True}
    megatron = {"sequence_parallel": layout.tp > 1}
    config = reference.make_config(tiny_models[model], megatron_cfg=megatron, sequence_packing=packing, optimizer=UNCLIPPED)
    batch = group_batch()
    truth = reference.train_reference(tiny_models[model], batch, config, reference.sft_reference, steps=1)
    apart = SequencePackingConfig.model_validate({**packing, "shared_prefix": False})
    with megatron_pool.group(layout, config) as group:
        found = run(group, batch)
        group.call("configure", {"sequence_packing": apart})
        whole = run(group, batch)
    assert found["saved"] > 0.1 and whole["saved"] == 0
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    for name, expected in (("logprobs", truth.logprobs), ("entropy", truth.entropy)):
        np.testing.assert_allclose(found[name], whole[name], atol=2e-6, rtol=0)
        np.testing.assert_allclose(found[name], expected * inside, atol=1e-5, rtol=0)
    assert found["loss"] == pytest.approx(whole["loss"], abs=1e-6) == pytest.approx(truth.losses[0], abs=2e-6)
    reference.assert_gradients(found["gradients"], whole["gradients"], 5e-6)
    reference.assert_gradients(found["gradients"], truth.gradients, 2e-5)


def group_batch() -> Batch:
    """Three prompts with completions of different lengths, one of them without a token in the loss."""
    prompts, lengths = np.array([12] * 3 + [9] * 3 + [15] * 2), np.array([22, 13, 17, 12, 21, 9, 20, 16])
    places, batch = np.arange(reference.WIDTH), reference.make_batch(grpo=True)
    tokens = np.random.default_rng(5).integers(0, reference.VOCABULARY, batch["tokens"].shape)
    for row in (1, 2, 4, 5, 7):
        tokens[row, : prompts[row]] = tokens[row - 1, : prompts[row]]
    inside = places < lengths[:, None]
    mask = (inside & (places >= prompts[:, None])).astype(np.float32)
    counts = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float((mask.sum(1) > 0).sum())}
    return batch.with_fields(tokens=tokens * inside, lengths=lengths, loss_mask=mask).with_scalars(**counts)


def run(group: Group, batch: Batch) -> dict[str, Any]:
    """Returns loss, gradients, log-probabilities, entropy, and the share of saved tokens."""
    rows = logprobs(group, batch)
    step = train(group, batch, warmup="whole")  # gradients, but no update
    gradients = reference.assemble(group.call("gradients"))
    metrics = {"loss": step["loss"], "saved": step["shared_prefix_share"], "gradients": gradients}
    return {**metrics, "logprobs": rows["logprobs"], "entropy": rows["entropy"]}
