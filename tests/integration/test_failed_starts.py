"""Workers whose start failed: they give everything back, and the same processes can be set up again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError

TP2 = ParallelLayout(tp=2)


@pytest.mark.slow
def test_train_workers_that_find_no_weights_can_be_set_up_again(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """They have joined their groups and built the model by then; no group, and no thread of one, is left."""
    good, batch = reference.make_config(tiny_models["qwen3"]), reference.make_batch()
    shutil.copy(tiny_models["qwen3"] / "config.json", tmp_path)
    with megatron_pool.group(TP2, good) as group:
        expected = group.call("logprobs", batch)
    before = group.call("threads")
    for _ in range(2):
        with (
            pytest.raises(WorkerError, match="cannot read the weights in"),
            megatron_pool.group(TP2, reference.make_config(tmp_path)),
        ):
            pass
    assert all(now <= then for now, then in zip(group.call("threads"), before, strict=True))
    with megatron_pool.group(TP2, good) as group:
        found = group.call("logprobs", batch)
    assert (found[0]["logprobs"] == expected[0]["logprobs"]).all()


@pytest.mark.slow
def test_a_train_worker_whose_peers_were_missing_joins_them_later(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    config, batch = reference.make_config(tiny_models["qwen3"]), reference.make_batch()
    alone = Group(megatron_pool.connections[:1], TP2)
    with pytest.raises(WorkerError, match=r"1/2 clients joined"):
        alone.call("new", WorkerContext("train", 0, TP2, config.seed, 2.0), config, f"127.0.0.1:{reserve_port()}", "policy")
    with megatron_pool.group(TP2, config, timeout_s=20.0) as group:
        assert group.call("logprobs", batch)[0] is not None
