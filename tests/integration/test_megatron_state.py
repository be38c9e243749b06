"""State of a Megatron worker: exports, the reference policy, and warm-ups that change nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import logprobs, train

DP2, TP2PP2 = ParallelLayout(dp=2), ParallelLayout(tp=2, pp=2)
ROUND_TRIPS = [
    ("qwen3", ParallelLayout(tp=4)),
    ("qwen3_tied", ParallelLayout(pp=2, vpp=2)),
    ("qwen2", ParallelLayout(dp=2, tp=2)),
    ("small_vocabulary", ParallelLayout(tp=2)),
    ("mixtral", ParallelLayout(dp=2, tp=2, ep=2)),
    ("glm4_moe", ParallelLayout(pp=2, tp=2, ep=2, etp=1)),
]


@pytest.mark.parametrize(
    ("model", "layout"), ROUND_TRIPS, ids=[f"{m}-{layout.describe().replace(' ', '')}" for m, layout in ROUND_TRIPS]
)
def test_an_export_equals_the_import(
    model: str, layout: ParallelLayout, megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    with megatron_pool.group(layout, reference.make_config(tiny_models[model])) as group:
        group.call("export_hf", str(tmp_path))
    imported, exported = load_file(tiny_models[model] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(imported) == set(exported)
    for name, tensor in imported.items():
        assert torch.equal(tensor, exported[name]), name


def test_an_export_to_a_full_disk_raises_on_all_workers_at_once(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The writing worker fails. No other worker waits until the deadline, and the next export works."""
    with megatron_pool.group(TP2PP2, reference.make_config(tiny_models["qwen3"])) as group:
        for rank in range(4):
            group.start(rank, "export_to_a_full_disk", str(tmp_path / "out"), 60_000)
        for rank in range(4):
            with pytest.raises(WorkerError, match=r"cannot write .*out\.partial: .*No space left on device") as caught:
                group.finish(rank, timeout_s=30)
            assert caught.value.kind == "CheckpointError"
        assert not (tmp_path / "out").exists()
        group.call("export_hf", str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_trained_policy_in_several_files_loads_in_transformers(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    batch = reference.make_batch()
    with megatron_pool.group(TP2PP2, reference.make_config(tiny_models["qwen3_tied"])) as group:
        train(group, batch)
        trained = logprobs(group, batch)
        group.call("export_in_files", str(tmp_path), 60_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected, _ = reference.hf_logprobs(model, batch)
    np.testing.assert_allclose(trained["logprobs"], expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_warm_up_changes_nothing(sharded: bool, megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    config = reference.make_config(tiny_models["qwen3"], sharded=sharded)
    batch = reference.make_batch()
    with megatron_pool.group(DP2, config) as group:
        fresh = group.call("state")
        assert any(name.startswith("exp_avg.") for name in fresh[0])  # created before the first step
        train(group, batch, warmup=True)
        _assert_same_states(group.call("state"), fresh)
        train(group, batch)
        trained = group.call("state")
        assert trained[0]["steps"] == 1
        train(group, batch, warmup=True)
        train(group, batch.with_scalars(global_valid_tokens=1e-45), warmup=True)  # not even a step that would be skipped
        logprobs(group, batch)
        _assert_same_states(group.call("state"), trained)


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [(ParallelLayout(), 3), (ParallelLayout(pp=2, vpp=2), 4)],
    ids=["single", "pp2vpp2"],
)
def test_a_warm_up_runs_few_microbatches(
    layout: ParallelLayout, microbatches: int, megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    """Of a batch of eight, in each of four layers. Results have the whole batch's shape."""
    batch = reference.make_batch()
    with megatron_pool.group(layout, reference.make_config(tiny_models["qwen3"], train_micro_batch_size=1)) as group:
        for warmup, expected in ((True, microbatches), (False, reference.ROWS)):
            runs = group.call("attention_runs", batch, warmup=warmup)
            assert [count for stage in runs for count in stage] == [expected] * 4
        found = [part for part in group.call("logprobs", batch, warmup=True) if part is not None]
        assert [part["logprobs"].shape for part in found] == [batch["tokens"].shape]


def test_a_worker_that_runs_out_of_memory_is_aborted(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    with megatron_pool.group(ParallelLayout(), reference.make_config(tiny_models["qwen3"])) as group:
        group.call("exceed_memory", reference.make_batch(), warmup=True)
        with pytest.raises(WorkerError, match="aborted"):
            group.call("attention_runs", reference.make_batch(), warmup=True)


def _assert_same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_a_step_with_infinite_gradients_is_skipped_and_counted(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    batch = reference.make_batch()
    with megatron_pool.group(DP2, reference.make_config(tiny_models["qwen3"])) as group:
        before = group.call("state")
        skipped = train(group, batch.with_scalars(global_valid_tokens=1e-45))
        assert skipped["skipped_steps"] == 1 and not np.isfinite(skipped["grad_norm"])
        _assert_same_states(group.call("state"), [{**state, "skipped": 1} for state in before])
        following = train(group, batch)
        assert following["skipped_steps"] == 1 and np.isfinite(following["loss"])


def test_steps_below_bfloat16_precision_accumulate(megatron_pool: MegatronPool, tiny_models: dict[str, Path]) -> None:
    """Steps below bfloat16's precision add up only in float32 master weights."""
    optimizer = {"lr": 1e-5, "weight_decay": 0.0}
    config = reference.make_config(tiny_models["qwen3"], precision="bfloat16", optimizer=optimizer)
    batch = reference.make_batch()
    with megatron_pool.group(DP2, config) as group:
        exact = logprobs(group, batch)
        masters = {name: value for name, value in group.call("state")[0].items() if name.startswith("master.")}
        for _ in range(3):
            train(group, batch)
        moved = group.call("state")[0]
        group.call("reset_optimizer")
        began_anew = group.call("state")[0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float32)
        expected, _ = reference.hf_logprobs(model, batch)
    np.testing.assert_allclose(exact["logprobs"], expected.numpy(), atol=0.1)
    steps = np.concatenate([np.abs(moved[name] - value).ravel() for name, value in masters.items()])
    assert 1e-6 < np.median(steps[steps > 0]) < 4e-5
    assert not any(value.any() for name, value in began_anew.items() if name.startswith(("exp_avg", "step.")))
    for name in masters:  # as if training started with the current weights
        rounded = torch.from_numpy(moved[name]).bfloat16().float().numpy()
        assert (rounded != moved[name]).any()
        np.testing.assert_array_equal(began_anew[name], rounded, err_msg=name)


@pytest.mark.parametrize("aborted", [0, 1], ids=["peer", "itself"])
def test_waiting_for_or_in_an_aborted_worker_raises_at_once(
    aborted: int, megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    batch, config = reference.make_batch(), reference.make_config(tiny_models["qwen3"])
    with megatron_pool.group(ParallelLayout(tp=2), config) as group:
        group.call("logprobs", batch)
        group.start(1, "aborted_after", 1.0 if aborted == 1 else None, "logprobs", batch)  # worker 0 never joins
        time.sleep(1.0)
        start = time.monotonic()
        if aborted == 0:
            group.start(0, "abort")
            group.finish(0)
        with pytest.raises(WorkerError, match=r"pair closure|closed by peer"):
            group.finish(1)
        assert time.monotonic() - start < 30, "not the deadline of a collective, a minute"
        with pytest.raises(WorkerError, match="was aborted; restart the group"):
            group.start(aborted, "logprobs", batch)
            group.finish(aborted)
    with megatron_pool.group(ParallelLayout(tp=2), config) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None
