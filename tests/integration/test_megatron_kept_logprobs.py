"""A step on log-probabilities that stayed with the workers equals, bit for bit, the step that is given them in its batch."""

from typing import Any

import numpy as np
import pytest

from dagrl.config import LossConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool
from tests.integration.test_megatron_layouts import PACKED, UNCLIPPED, logprobs, shard_batches, train

LOSS = LossConfig(reference_policy_kl_penalty=0.1)
CASES = [
    pytest.param(ParallelLayout(dp=2, pp=2), {}, id="dp2pp2"),
    pytest.param(ParallelLayout(tp=2, cp=2), PACKED, id="tp2cp2-packed", marks=pytest.mark.slow),
]


def keep(group: Group, batch: Batch, model: str) -> None:
    """On the shards that train on the rows."""
    shards = shard_batches(batch, group.layout)
    ranks = range(group.layout.world_size)
    group.call("keep_logprobs", per_rank=[(shards[group.layout.coordinates(rank).dp], model) for rank in ranks])


def identified(batch: Batch) -> Batch:
    """Returns the batch as the loops send it: row ids instead of columns."""
    fields = {name: array for name, array in batch.fields.items() if name not in ("prev_logprobs", "reference_logprobs")}
    ids = 100 + np.arange(batch.rows)
    return Batch({**fields, "row_ids": ids}, {**batch.scalars, "step": 7})


@pytest.mark.parametrize(("layout", "packed"), CASES)
def test_losses_and_gradients_are_equal(layout: ParallelLayout, packed: dict[str, Any], pool: MegatronPool) -> None:
    config = reference.make_config(pool.models["qwen3"], optimizer=UNCLIPPED, **packed)
    batch = reference.make_batch(grpo=True).with_scalars(lr=0.0)
    with pool.group(layout, config.model_copy(update={"loss_fn": LOSS})) as group:
        group.call("snapshot_reference")
        policy = logprobs(group, batch)
        columns = {
            "prev_logprobs": policy["logprobs"],
            "reference_logprobs": logprobs(group, batch, "reference")["logprobs"],
        }
        mask = batch["loss_mask"]
        given = batch.with_fields(**{name: column * mask for name, column in columns.items()})
        expected = train(group, given, "policy"), gradients_of(group)
        for model in ("policy", "reference"):
            keep(group, identified(batch), model)
        found = train(group, identified(batch), "policy"), gradients_of(group)
    entropy = found[0].pop("policy/entropy")
    assert entropy == pytest.approx(float((policy["entropy"] * mask).sum() / mask.sum()), rel=1e-6)
    assert found[0] == expected[0] and expected[0]["grad_norm"] > 0.01
    for name, gradient in expected[1].items():
        np.testing.assert_array_equal(found[1][name], gradient, err_msg=name)


def gradients_of(group: Group) -> dict[str, Any]:
    return dict(reference.assemble(group.call("gradients")))
