"""Checkpoints, exports and offloaded state of train workers: any layout, written during training, failing together."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dagrl.files import verify_files
from dagrl.workers.train.offload import STATE_PARTS
from tests.integration import megatron_reference as reference
from tests.integration.processes import ends_within
from tests.integration.train_cases import Case, each, fsdp, logprobs, megatron, train
from tests.integration.train_pool import Group, WorkerError, WorkerPool

DP2 = megatron("qwen3", dp=2)
BFLOAT16 = {"precision": "bfloat16"}
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 8, "lr_warmup_iters": 2}
RESUMED = {
    megatron("qwen3_tied", tp=2, pp=2, slow=True): [megatron("qwen3_tied", dp=2, sharded=True)],
    megatron("qwen3", cp=2, sharded=True, slow=True): [megatron("qwen3", tp=4)],  # with another padding of the vocabulary
    megatron("glm4_moe", dp=2, ep=2, sharded=True): [megatron("glm4_moe", tp=2, ep=2, etp=1)],
    megatron("qwen3_tied", dp=2, sharded=True, policy=BFLOAT16, slow=True): [megatron("qwen3_tied", tp=2, policy=BFLOAT16)],
    fsdp("gemma3", dp=2, slow=True): [
        fsdp("gemma3", tp=2),
        fsdp("gemma3", cp=2),
        fsdp("gemma3", dp=4, replicas=2, packed=True),
    ],
    fsdp("qwen3_moe", dp=2, ep=2, slow=True): [fsdp("qwen3_moe")],
}


@each(RESUMED)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    batch, directory, exact = reference.make_batch(), str(tmp_path / "step-2"), case.policy != BFLOAT16

    def moments(case: Case, group: Group) -> dict[str, Any]:
        whole = case.backend == "megatron" and not case.sharded
        return reference.assemble(group.call("moments")) if whole else {}

    with case.group(pool, scheduler=SCHEDULE) as group:
        for _ in range(2):
            train(group, batch)
        train(group, batch.with_scalars(global_valid_tokens=1e-45))  # gradients beyond all numbers: skipped
        group.call("snapshot_reference")
        files = group.call("save_checkpoint", directory)
        weights, saved_moments = reference.assemble(group.call("weights")), moments(case, group)
        went_on = [train(group, batch) for _ in range(2)]
        kept = logprobs(group, batch, "reference")["logprobs"]
        assert np.abs(kept - logprobs(group, batch)["logprobs"]).max() > 1e-3
    verify_files(Path(directory), {name: entry for part in files for name, entry in part.items()})
    assert sum(map(len, files)) == len(list(Path(directory).glob("*.distcp")))
    for other in (case, *RESUMED[case]):
        with other.group(pool, scheduler=SCHEDULE) as group:
            group.call("load_checkpoint", directory)
            assert_equal(reference.assemble(group.call("weights")), weights)
            if saved_moments and (found := moments(other, group)):
                assert_equal(found, saved_moments)
            resumed = [train(group, batch) for _ in range(2)]
            again = logprobs(group, batch, "reference")["logprobs"]
        if other is case:
            assert resumed == went_on  # bit for bit: losses, norms and learning rates
            np.testing.assert_array_equal(again, kept)
        np.testing.assert_allclose(again, kept, atol=1e-5 if exact else 1e-1)
        for found, expected in zip(resumed, went_on, strict=True):
            assert (found["lr"], found["skipped_steps"]) == (expected["lr"], 1)
            assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5 if exact else 1e-2)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4 if exact else 5e-2)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def assert_same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(mine, theirs)


@each([megatron("qwen3", dp=2, slow=True), megatron("qwen3", dp=2, sharded=True)])
def test_a_background_checkpoint_has_the_state_at_its_start(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    batch, directory, trained = reference.make_batch(), tmp_path / "checkpoint", tmp_path / "trained"
    with case.group(pool) as group:
        train(group, batch)
        before = group.call("state")
        group.call("hold_writing", str(trained))
        group.call("save_checkpoint", str(directory), True)
        train(group, batch)
        assert not any(group.call("checkpoint_written"))
        trained.touch()
        assert ends_within(120.0, lambda: not all(group.call("checkpoint_written")))
        files = group.call("finish_checkpoint")
        verify_files(directory, {name: entry for part in files for name, entry in part.items()})
        group.call("reseed", 99)
        assert all(
            (now["random.cpu"] != then["random.cpu"]).any() for now, then in zip(group.call("state"), before, strict=True)
        )
        group.call("load_checkpoint", str(directory))
        assert_same_states(group.call("state"), before)


def test_a_slow_disk_has_until_the_checkpoint_deadline(pool: WorkerPool, tmp_path: Path) -> None:
    """One worker's disk is slower than the deadline of collectives."""
    directory = str(tmp_path / "checkpoint")
    with DP2.group(pool) as group:
        before = group.call("state")
        group.call("shorten_collectives", 1.5)
        group.call("slow_disk", per_rank=[(0.0,), (2.0,)])
        group.call("save_checkpoint", directory)
        group.call("load_checkpoint", directory)
        assert_same_states(group.call("state"), before)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_of_one_worker_raises_on_all(background: bool, pool: WorkerPool, tmp_path: Path) -> None:
    """The next save works."""
    with DP2.group(pool) as group:
        before = group.call("state")
        group.call("fill_disk", per_rank=[(False,), (True,)])
        if background:
            group.call("save_checkpoint", str(tmp_path / "first"), True)
        method = ("finish_checkpoint",) if background else ("save_checkpoint", str(tmp_path / "first"))
        fails(group, r"cannot write .*first: .*No space left on device", *method)
        group.call("save_checkpoint", str(tmp_path / "second"))
        group.call("load_checkpoint", str(tmp_path / "second"))
        assert_same_states(group.call("state"), before)


def test_a_stuck_save_is_an_error_after_the_deadline(pool: WorkerPool, tmp_path: Path) -> None:
    with megatron("qwen3").group(pool) as group:
        group.call("hold_writing", str(tmp_path / "released"))
        group.call("shorten_checkpoints", 0.5)
        group.call("save_checkpoint", str(tmp_path / "checkpoint"), True)
        with pytest.raises(WorkerError, match=r"checkpoint is not written after [01] s; .*Raise timeouts\.checkpoint_s"):
            group.call("finish_checkpoint")
        (tmp_path / "released").touch()


def test_a_checkpoint_that_does_not_fit_is_rejected(pool: WorkerPool, tmp_path: Path) -> None:
    """On every worker, with its state unchanged. tests/unit/workers/test_train_checkpoint.py has other models."""
    directory = tmp_path / "checkpoint"
    with DP2.group(pool) as group:
        group.call("save_checkpoint", str(directory))
        before = group.call("state")
        fails(group, r"cannot read .*worker\.json", "load_checkpoint", str(tmp_path / "nothing"))
        metadata = (directory / ".metadata").read_bytes()
        (directory / ".metadata").write_bytes(metadata.replace(b"final_layernorm", b"final_layernorX"))
        fails(group, r"cannot load .*: it has no .*final_layernorm", "load_checkpoint", str(directory))
        (directory / ".metadata").write_bytes(metadata)
        assert_same_states(group.call("state"), before)


def fails(group: Group, message: str, method: str, *args: str) -> None:
    """Checks that every worker raises, including those that could go on."""
    for rank in range(2):
        group.start(rank, method, *args)
    for rank in range(2):
        with pytest.raises(WorkerError, match=message) as caught:
            group.finish(rank)
        assert caught.value.kind == "CheckpointError"


OFFLOADED = [
    megatron("qwen3", tp=2, slow=True),
    megatron("qwen3", dp=2, sharded=True, policy=BFLOAT16),
    megatron("qwen3_moe", dp=2, ep=2, sharded=True),
    fsdp("gemma3", dp=2, packed=True, policy=BFLOAT16, slow=True),
    fsdp("qwen3_moe", dp=2, tp=2, ep=2, policy=BFLOAT16, slow=True),
]


@each(OFFLOADED)
def test_training_continues_unchanged_after_offloading(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    batch, keys = reference.make_batch(), {"model_name": str(in_bfloat16(pool.models[case.model], tmp_path / "model"))}
    with case.group(pool, **keys) as group:
        train(group, batch)
        undisturbed = [logprobs(group, batch)["logprobs"], train(group, batch), train(group, batch)]
    with case.group(pool, **keys) as group:
        train(group, batch)
        train(group, batch, warmup="whole")  # leaves gradients
        state, resident = group.call("state"), group.call("resident_bytes")
        assert all(size > 0 for parts in resident for size in parts.values())
        group.call("offload", STATE_PARTS)
        group.call("offload", ("weights",))  # offloading again does nothing
        assert group.call("resident_bytes") == [dict.fromkeys(STATE_PARTS, 0)] * len(resident)
        with pytest.raises(WorkerError, match="needs the weights, which are offloaded"):
            logprobs(group, batch)
        group.call("reload", STATE_PARTS)
        if case.backend == "fsdp":  # which frees gradients
            resident = [{**parts, "gradients": 0} for parts in resident]
        assert group.call("resident_bytes") == resident
        assert_same_states(group.call("state"), state)
        group.call("prepare_for_logprobs", 1)
        assert [parts["optimizer"] for parts in group.call("resident_bytes")] == [0] * len(resident)
        disturbed = [logprobs(group, batch)["logprobs"]]
        group.call("prepare_for_training", 1)
        disturbed += [train(group, batch), train(group, batch)]
    np.testing.assert_array_equal(disturbed[0], undisturbed[0])
    assert disturbed[1:] == undisturbed[1:]  # bit for bit


def in_bfloat16(model: Path, directory: Path) -> Path:
    """Copies a model in bfloat16: on a CPU, weights that have their file's dtype stay mapped to it, and are not freed."""
    shutil.copytree(model, directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_a_warm_up_of_offloading_moves_nothing(pool: WorkerPool) -> None:
    with megatron("qwen3").group(pool) as group:
        resident = group.call("resident_bytes")
        group.call("prepare_for_logprobs", 0, warmup=True)
        assert group.call("resident_bytes") == resident
        train(group, reference.make_batch())


IMPORTED = [
    megatron("qwen3", tp=4),
    megatron("qwen3_tied", pp=2, vpp=2),
    megatron("qwen2", dp=2, tp=2),
    megatron("small_vocabulary", tp=2),
    megatron("mixtral", dp=2, tp=2, ep=2),
    megatron("glm4_moe", pp=2, tp=2, ep=2, etp=1),
]


@each(IMPORTED)
def test_an_export_equals_the_import(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    with case.group(pool) as group:
        group.call("export_hf", str(tmp_path))
    imported, exported = (load_file(path / "model.safetensors") for path in (pool.models[case.model], tmp_path))
    assert set(imported) == set(exported)
    for name, tensor in imported.items():
        assert torch.equal(tensor, exported[name]), name


def test_an_export_to_a_full_disk_raises_on_all_workers_at_once(pool: WorkerPool, tmp_path: Path) -> None:
    """The writing worker fails. No other worker waits until the deadline, and the next export works."""
    with megatron("qwen3", tp=2, pp=2).group(pool) as group:
        for rank in range(4):
            group.start(rank, "export_to_a_full_disk", str(tmp_path / "out"), 60_000)
        for rank in range(4):
            with pytest.raises(WorkerError, match=r"cannot write .*out\.partial: .*No space left on device") as caught:
                group.finish(rank, timeout_s=30)
            assert caught.value.kind == "CheckpointError"
        assert not (tmp_path / "out").exists()
        group.call("export_hf", str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


EXPORTED = [
    megatron("qwen3_tied", tp=2, pp=2),
    fsdp("gemma3", dp=2, cp=2, slow=True),
    fsdp("qwen3_moe", dp=2, tp=2, ep=2, slow=True),
    fsdp("phi", tp=2, slow=True),
]


@each(EXPORTED)
def test_transformers_loads_a_trained_policy_with_equal_logits(case: Case, pool: WorkerPool, tmp_path: Path) -> None:
    """Megatron's in several files. What else is in the model's directory is copied; a tied head is written once."""
    model, batch = pool.models[case.model], reference.make_batch()
    others = ("generation_config.json", "tokenizer.json", "chat_template.jinja")
    for name in others:
        (model / name).write_text(json.dumps({"temperature": 0.125}))
    with case.group(pool) as group:
        train(group, batch)
        found = logprobs(group, batch)["logprobs"]
        group.call("export_in_files", str(tmp_path), 60_000 if case.backend == "megatron" else 1 << 30)
    with torch.no_grad():
        expected, _ = reference.hf_logprobs(reference.load_model(tmp_path), batch)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5, rtol=0)
    for name in others:
        assert (tmp_path / name).read_bytes() == (model / name).read_bytes()
        (model / name).unlink()
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (case.backend == "megatron")
    assert {name for file in files for name in load_file(file)} == set(load_file(model / "model.safetensors"))
