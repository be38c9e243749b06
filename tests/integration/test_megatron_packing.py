"""Packed and dynamic microbatches give the losses, gradients and log-probabilities of padded ones, in several layouts.

`test_megatron_layouts` checks the padded ones, and some packed cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.config import DynamicBatchingConfig, LossConfig, SequencePackingConfig
from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train

PADDED: dict[str, Any] = {"sequence_packing": SequencePackingConfig(), "dynamic_batching": DynamicBatchingConfig()}
PACKED = PADDED | {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=40, logprob_mb_tokens=64)}
DYNAMIC = PADDED | {
    "dynamic_batching": DynamicBatchingConfig(
        enabled=True, train_mb_tokens=48, logprob_mb_tokens=64, sequence_length_round=8
    )
}
LAYOUTS = [
    ("qwen3", ParallelLayout(dp=2, cp=2), (PACKED, DYNAMIC)),
    ("qwen3", ParallelLayout(pp=2, tp=2), (PACKED, DYNAMIC)),
    ("qwen3_moe", ParallelLayout(dp=2, pp=2, ep=2, vpp=2), (PACKED, DYNAMIC)),
]


@pytest.mark.parametrize(
    ("model", "layout", "ways"), LAYOUTS, ids=[f"{m}-{layout.describe().replace(' ', '')}" for m, layout, _ in LAYOUTS]
)
def test_losses_and_gradients_are_those_of_padded_microbatches(
    model: str,
    layout: ParallelLayout,
    ways: tuple[dict[str, Any], ...],
    megatron_pool: MegatronPool,
    tiny_models: dict[str, Path],
) -> None:
    config = reference.make_config(
        tiny_models[model],
        train_micro_batch_size=1,
        logprob_batch_size=2,
        megatron_cfg={"sequence_parallel": layout.tp > 1},
        **{key: section.model_dump() for key, section in ways[-1].items()},
        optimizer=UNCLIPPED,
    )
    config = config.model_copy(update={"loss_fn": LossConfig(token_level_loss=False)})
    with megatron_pool.group(layout, config) as group:
        group.call("configure", PADDED)
        expected = run(group)
        assert expected["share"] > 0.3
        for way in ways:
            group.call("configure", way)
            found = run(group)
            assert found["share"] < expected["share"]
            np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-6, rtol=0)
            for name in ("logprobs", "entropy"):
                np.testing.assert_allclose(found[name], expected[name], atol=2e-6, rtol=0)
            for name, gradient in expected["gradients"].items():
                scale = float(np.abs(gradient).max()) or 1.0
                np.testing.assert_allclose(found["gradients"][name] / scale, gradient / scale, atol=5e-6, err_msg=name)


def run(group: Group) -> dict[str, Any]:
    """Returns loss, gradients, log-probabilities, entropy, and the padding share of the model's input."""
    batch = reference.make_batch(grpo=True)
    rows = logprobs(group, batch)
    step = train(group, batch, "policy", warmup=True)  # gradients, but no update
    metrics = {"loss": step["loss"], "share": step["microbatch_padding_share"]}
    gradients = reference.assemble(group.call("gradients"))
    return {**metrics, "gradients": gradients, "logprobs": rows["logprobs"], "entropy": rows["entropy"]}
