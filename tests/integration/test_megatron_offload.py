"""Offloaded train state returns unchanged, its memory is freed, and misuse raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import logprobs, train

ALL = ("weights", "gradients", "optimizer")
BFLOAT16_SHARDED = {"precision": "bfloat16", "sharded": True}
SHARDED = {"sharded": True}
CASES = [
    pytest.param("qwen3", ParallelLayout(tp=2), {}, id="tp2", marks=pytest.mark.slow),
    pytest.param("qwen3", ParallelLayout(dp=2), BFLOAT16_SHARDED, id="dp2-bfloat16-sharded"),
    pytest.param("qwen3_moe", ParallelLayout(dp=2, ep=2), SHARDED, id="moe-ep2-sharded"),
]


@pytest.mark.parametrize(("model", "layout", "policy"), CASES)
def test_training_continues_unchanged_after_offloading(
    model: str,
    layout: ParallelLayout,
    policy: dict[str, Any],
    megatron_pool: MegatronPool,
    tiny_models: dict[str, Path],
) -> None:
    batch, config = reference.make_batch(), reference.make_config(tiny_models[model], **policy)
    with megatron_pool.group(layout, config) as group:
        train(group, batch)
        undisturbed = [logprobs(group, batch)["logprobs"], train(group, batch), train(group, batch)]
    with megatron_pool.group(layout, config) as group:
        train(group, batch)
        state, resident = group.call("state"), group.call("resident_bytes")
        group.call("offload", ALL)
        group.call("offload", ("weights",))  # offloading again does nothing
        assert group.call("resident_bytes") == [dict.fromkeys(ALL, 0)] * layout.world_size
        group.call("reload", ALL)
        assert group.call("resident_bytes") == resident and all(min(parts.values()) > 0 for parts in resident)
        for found, expected in zip(group.call("state"), state, strict=True):
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
        group.call("prepare_for_logprobs", 1)
        assert [parts["optimizer"] for parts in group.call("resident_bytes")] == [0] * layout.world_size
        disturbed = [logprobs(group, batch)["logprobs"]]
        group.call("prepare_for_training", 1)
        disturbed += [train(group, batch), train(group, batch)]
    np.testing.assert_array_equal(disturbed[0], undisturbed[0])
    assert disturbed[1:] == undisturbed[1:]  # bit for bit


def test_offloaded_parts_cannot_be_used(megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    batch, config = reference.make_batch(), reference.make_config(tiny_models["qwen3"])
    with megatron_pool.group(ParallelLayout(), config) as group:
        group.call("offload", ("optimizer",))
        logprobs(group, batch)
        for method, *args in [("save_checkpoint", str(tmp_path / "c")), ("reset_optimizer",)]:
            with pytest.raises(WorkerError, match=r"needs the optimizer, which are offloaded; call reload\("):
                group.call(method, *args)
        with pytest.raises(WorkerError, match="needs the optimizer"):
            train(group, batch)
        group.call("offload", ("weights", "gradients"))
        with pytest.raises(WorkerError, match="worker 0 needs the weights, which are offloaded"):
            logprobs(group, batch)
        with pytest.raises(WorkerError, match="expected some of weights, gradients, optimizer"):
            group.call("offload", ("activations",))
        group.call("reload", ALL)
        train(group, batch)


def test_a_warm_up_of_offloading_moves_nothing(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    batch, config = reference.make_batch(), reference.make_config(tiny_models["qwen3"])
    with megatron_pool.group(ParallelLayout(), config) as group:
        resident = group.call("resident_bytes")
        group.call("prepare_for_logprobs", 0, warmup=True)
        assert group.call("resident_bytes") == resident
        train(group, batch)
