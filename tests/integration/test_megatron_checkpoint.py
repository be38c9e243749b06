"""Checkpoints of Megatron workers: load in any layout, write during training, survive crashes, detect damage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import logprobs, train

SINGLE, DP2, TP2PP2 = ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(tp=2, pp=2)
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
BFLOAT16 = {"precision": "bfloat16"}
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 8, "lr_warmup_iters": 2}
Setting = tuple[ParallelLayout, dict[str, Any]]
CASES: list[tuple[str, Setting, list[Setting]]] = [
    ("qwen3_tied", (TP2PP2, {}), [(DP2, SHARDED), (ParallelLayout(pp=2, vpp=2), {})]),
    (
        "qwen3",
        (ParallelLayout(cp=2), SHARDED),
        [(SINGLE, {}), (ParallelLayout(tp=4), {})],
    ),  # different vocabulary padding
    ("glm4_moe", (ParallelLayout(dp=2, ep=2), SHARDED), [(ParallelLayout(tp=2, ep=2, etp=1), {})]),
    ("qwen3_tied", (DP2, {**BFLOAT16, **SHARDED}), [(ParallelLayout(tp=2), BFLOAT16)]),
]


def config_of(model: Path, policy: dict[str, Any]) -> Any:
    megatron: dict[str, Any] = {"scheduler": SCHEDULE}
    if model.name == "glm4_moe":
        megatron["moe_router_bias_update_rate"] = 0.01
    return reference.make_config(model, megatron_cfg=megatron, **policy)


@pytest.mark.parametrize(("model", "first", "others"), CASES, ids=["tied", "sharded", "experts", "bfloat16"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    model: str,
    first: Setting,
    others: list[Setting],
    megatron_pool: MegatronPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
) -> None:
    batch, directory, (layout, policy) = reference.make_batch(), str(tmp_path / "step-2"), first
    with megatron_pool.group(layout, config_of(tiny_models[model], policy)) as group:
        for _ in range(2):
            train(group, batch)
        train(group, batch.with_scalars(global_valid_tokens=1e-45))  # gradients beyond all numbers: skipped
        group.call("snapshot_reference")
        group.call("save_checkpoint", directory, {"step": 2, "seen": [1, 2]})
        weights = reference.assemble(group.call("weights"))
        moments = None if "optimizer" in policy else reference.assemble(group.call("moments"))
        went_on = [train(group, batch) for _ in range(2)]
        kept = logprobs(group, batch, "reference")["logprobs"]
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.old"))
    for other, settings in [first, *others]:
        with megatron_pool.group(other, config_of(tiny_models[model], settings)) as group:
            assert group.call("load_checkpoint", directory) == [{"step": 2, "seen": [1, 2]}] * other.world_size
            _assert_equal(reference.assemble(group.call("weights")), weights)
            if moments is not None and "optimizer" not in settings:
                _assert_equal(reference.assemble(group.call("moments")), moments)
            resumed = [train(group, batch) for _ in range(2)]
            again = logprobs(group, batch, "reference")["logprobs"]
        assert resumed[0]["skipped_steps"] == 1
        if (other, settings) == first:
            assert resumed == went_on  # bit for bit: losses, norms and learning rates
            np.testing.assert_array_equal(again, kept)
        for found, expected in zip(resumed, went_on, strict=True):
            exact = "precision" not in policy
            assert found["lr"] == expected["lr"]
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5 if exact else 1e-2)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4 if exact else 5e-2)


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("policy", [{}, SHARDED], ids=["replicated", "sharded"])
def test_a_background_checkpoint_has_the_state_at_its_start(
    policy: dict[str, Any], megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    batch, directory, trained = reference.make_batch(), tmp_path / "checkpoint", tmp_path / "trained"
    with megatron_pool.group(DP2, reference.make_config(tiny_models["qwen3"], **policy)) as group:
        train(group, batch)
        before = group.call("state")
        group.call("hold_writing", str(trained))
        group.call("save_checkpoint", str(directory), {}, True)
        train(group, batch)
        assert not any(group.call("checkpoint_written"))
        trained.touch()
        _wait_for(lambda: all(group.call("checkpoint_written")))
        assert not directory.exists()  # renamed only when it is complete on all workers
        group.call("save_checkpoint", str(tmp_path / "next"), {}, True)  # completes the previous one
        assert directory.exists()
        group.call("finish_checkpoint")
        group.call("reseed", 99)
        assert all(
            (now["random.cpu"] != then["random.cpu"]).any() for now, then in zip(group.call("state"), before, strict=True)
        )
        group.call("load_checkpoint", str(directory))
        _assert_same_states(group.call("state"), before)


def test_a_slow_disk_has_until_the_checkpoint_deadline(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """One worker's disk is slower than the deadline of collectives."""
    directory = str(tmp_path / "checkpoint")
    with megatron_pool.group(DP2, reference.make_config(tiny_models["qwen3"])) as group:
        before = group.call("state")
        group.call("shorten_collectives", 1.5)
        group.call("slow_disk", per_rank=[(0.0,), (2.0,)])
        group.call("save_checkpoint", directory, {"step": 1})
        assert group.call("load_checkpoint", directory) == [{"step": 1}] * 2
        _assert_same_states(group.call("state"), before)


def test_a_late_background_failure_raises_on_all_workers(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """One worker's directory disappears before it writes. The previous checkpoint stays, and the next save works."""
    directory = str(tmp_path / "checkpoint")
    with megatron_pool.group(DP2, reference.make_config(tiny_models["qwen3"])) as group:
        group.call("save_checkpoint", directory, {"step": 1})
        group.call("slow_disk", per_rank=[(0.0,), (1.0,)])
        group.call("save_checkpoint", directory, {"step": 2}, True)
        _wait_for(lambda: group.call("checkpoint_written")[0])  # a writer keeps the directory from being removed
        shutil.rmtree(f"{directory}.partial")
        for rank in range(2):
            group.start(rank, "finish_checkpoint")
        for rank in range(2):
            with pytest.raises(WorkerError, match=r"checkpoint\.partial") as caught:
                group.finish(rank)
            assert caught.value.kind == "CheckpointError"
        assert group.call("load_checkpoint", directory) == [{"step": 1}] * 2
        group.call("save_checkpoint", directory, {"step": 3})
        assert group.call("load_checkpoint", directory) == [{"step": 3}] * 2


def test_a_killed_or_stuck_save_keeps_the_previous_checkpoint(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    batch, directory, marker = reference.make_batch(), str(tmp_path / "checkpoint"), tmp_path / "stalled"
    config = reference.make_config(tiny_models["qwen3"])
    pool = MegatronPool(1)
    with pytest.raises(BrokenPipeError), pool.group(SINGLE, config) as group:  # the pool's process is gone at the end
        train(group, batch)
        saved = group.call("state")
        group.call("save_checkpoint", directory, {"step": 1})
        train(group, batch)
        group.call("stall_writing", str(marker))
        group.call("shorten_checkpoints", 0.5)
        group.call("save_checkpoint", directory, {"step": 2}, True)
        with pytest.raises(WorkerError, match=r"not written after 0 s|not written after 1 s"):
            group.call("finish_checkpoint")
        marker.unlink()
        group.start(0, "save_checkpoint", directory, {"step": 2})
        _wait_for(marker.exists)
        os.kill(pool.processes[0].pid or 0, signal.SIGKILL)
        pool.processes[0].join(10)
    pool.close()
    with megatron_pool.group(SINGLE, config) as group:
        assert group.call("load_checkpoint", directory) == [{"step": 1}]
        _assert_same_states(group.call("state"), saved)
        group.call("save_checkpoint", directory, {"step": 3})  # replaces the rest of the killed save
        assert group.call("load_checkpoint", directory) == [{"step": 3}]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint"]


def test_damaged_and_foreign_checkpoints_are_rejected(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    config, directory = reference.make_config(tiny_models["qwen3"]), tmp_path / "checkpoint"
    with megatron_pool.group(DP2, config) as group:
        group.call("save_checkpoint", str(directory), {"step": 1})
        group.call("save_checkpoint", str(directory), {"step": 2})
        assert group.call("load_checkpoint", str(directory)) == [{"step": 2}] * 2
        before = group.call("state")

        _rejected(group, tmp_path / "nothing", "cannot read .*manifest.json")
        part = max(directory.glob("__1_*.distcp"), key=lambda path: path.stat().st_size)
        whole = part.read_bytes()
        part.write_bytes(whole[: len(whole) // 2])
        _rejected(group, directory, f"{part.name} has .* damaged")
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        part.write_bytes(bytes(flipped))
        _rejected(group, directory, f"{part.name} has .* damaged")
        part.unlink()
        _rejected(group, directory, f"{part.name} is missing")
        manifest = json.loads((directory / "manifest.json").read_text())
        (directory / "manifest.json").write_text(json.dumps({**manifest, "format": "other"}))
        _rejected(group, directory, "format 'other'")
        (directory / "manifest.json").write_text(json.dumps([manifest]))
        _rejected(group, directory, "manifest.json holds a JSON list; expected an object of format")
        _assert_same_states(group.call("state"), before)
        part.write_bytes(whole)
        (directory / "manifest.json").write_text(json.dumps(manifest))
    with megatron_pool.group(DP2, reference.make_config(tiny_models["llama"])) as group:
        _rejected(group, directory, r"written with model .*model_type = qwen3 \(this run: llama\)")
    with megatron_pool.group(DP2, reference.make_config(tiny_models["qwen3"], **BFLOAT16)) as group:
        _rejected(group, directory, "written with precision float32, this run has bfloat16")


def test_an_equivalent_config_json_resumes(
    megatron_pool: MegatronPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Another end-of-sequence token, and the rope in transformers' format before `rope_parameters`."""
    directory, edited, batch = tmp_path / "checkpoint", tmp_path / "edited", reference.make_batch()
    with megatron_pool.group(SINGLE, reference.make_config(tiny_models["qwen3"])) as group:
        train(group, batch)
        group.call("save_checkpoint", str(directory), {"step": 1})
        went_on = train(group, batch)
    shutil.copytree(tiny_models["qwen3"], edited)
    config = json.loads((edited / "config.json").read_text())
    rope = config.pop("rope_parameters")
    (edited / "config.json").write_text(json.dumps({**config, "rope_theta": rope["rope_theta"], "eos_token_id": [7, 9]}))
    with megatron_pool.group(SINGLE, reference.make_config(edited)) as group:
        assert group.call("load_checkpoint", str(directory)) == [{"step": 1}]
        assert train(group, batch) == went_on
    (edited / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    with megatron_pool.group(SINGLE, reference.make_config(edited)) as group:
        group.start(0, "load_checkpoint", str(directory))
        with pytest.raises(WorkerError, match=rf"model rope_theta = {rope['rope_theta']:.1f} \(this run: 7\.0\);"):
            group.finish(0)


def _rejected(group: Group, directory: Path, message: str) -> None:
    """Every worker raises, including those whose own file is intact."""
    for rank in range(2):
        group.start(rank, "load_checkpoint", str(directory))
    for rank in range(2):
        with pytest.raises(WorkerError, match=message) as caught:
            group.finish(rank)
        assert caught.value.kind == "CheckpointError"


def _assert_same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def _wait_for(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
