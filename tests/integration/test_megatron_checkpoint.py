"""Checkpoints and offloaded state of Megatron workers: any layout, written during training, failing together, unchanged."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagrl.files import verify_files
from dagrl.runtime.layout import ParallelLayout
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import logprobs, train

SINGLE, DP2, TP2PP2 = ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(tp=2, pp=2)
SHARDED = {"sharded": True}
BFLOAT16 = {"precision": "bfloat16"}
SCHEDULE = {"lr_decay_style": "cosine", "lr_decay_iters": 8, "lr_warmup_iters": 2}
Setting = tuple[ParallelLayout, dict[str, Any]]
CASES: list[tuple[str, Setting, list[Setting]]] = [
    ("qwen3_tied", (TP2PP2, {}), [(DP2, SHARDED)]),
    ("qwen3", (ParallelLayout(cp=2), SHARDED), [(ParallelLayout(tp=4), {})]),  # with another padding of the vocabulary
    ("glm4_moe", (ParallelLayout(dp=2, ep=2), SHARDED), [(ParallelLayout(tp=2, ep=2, etp=1), {})]),
    ("qwen3_tied", (DP2, {**BFLOAT16, **SHARDED}), [(ParallelLayout(tp=2), BFLOAT16)]),
]


def config_of(model: Path, policy: dict[str, Any]) -> Any:
    return reference.make_config(model, scheduler=SCHEDULE, **policy)


@pytest.mark.parametrize(
    ("model", "first", "others"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name != "experts"))
        for name, case in zip(("tied", "sharded", "experts", "bfloat16"), CASES, strict=True)
    ],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    model: str, first: Setting, others: list[Setting], pool: MegatronPool, tmp_path: Path
) -> None:
    batch, directory, (layout, policy) = reference.make_batch(), str(tmp_path / "step-2"), first
    with pool.group(layout, config_of(pool.models[model], policy)) as group:
        for _ in range(2):
            train(group, batch)
        train(group, batch.with_scalars(global_valid_tokens=1e-45))  # gradients beyond all numbers: skipped
        group.call("snapshot_reference")
        files = group.call("save_checkpoint", directory)
        weights = reference.assemble(group.call("weights"))
        moments = None if "sharded" in policy else reference.assemble(group.call("moments"))
        went_on = [train(group, batch) for _ in range(2)]
        kept = logprobs(group, batch, "reference")["logprobs"]
    verify_files(Path(directory), {name: entry for part in files for name, entry in part.items()})
    assert sum(map(len, files)) == len(list(Path(directory).glob("*.distcp")))
    for other, settings in [first, *others]:
        with pool.group(other, config_of(pool.models[model], settings)) as group:
            group.call("load_checkpoint", directory)
            _assert_equal(reference.assemble(group.call("weights")), weights)
            if moments is not None and "sharded" not in settings:
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


@pytest.mark.parametrize(
    "policy", [pytest.param({}, marks=pytest.mark.slow, id="replicated"), pytest.param(SHARDED, id="sharded")]
)
def test_a_background_checkpoint_has_the_state_at_its_start(
    policy: dict[str, Any], pool: MegatronPool, tmp_path: Path
) -> None:
    batch, directory, trained = reference.make_batch(), tmp_path / "checkpoint", tmp_path / "trained"
    with pool.group(DP2, reference.make_config(pool.models["qwen3"], **policy)) as group:
        train(group, batch)
        before = group.call("state")
        group.call("hold_writing", str(trained))
        group.call("save_checkpoint", str(directory), True)
        train(group, batch)
        assert not any(group.call("checkpoint_written"))
        trained.touch()
        _wait_for(lambda: all(group.call("checkpoint_written")))
        files = group.call("finish_checkpoint")
        verify_files(directory, {name: entry for part in files for name, entry in part.items()})
        group.call("reseed", 99)
        assert all(
            (now["random.cpu"] != then["random.cpu"]).any() for now, then in zip(group.call("state"), before, strict=True)
        )
        group.call("load_checkpoint", str(directory))
        _assert_same_states(group.call("state"), before)


def test_a_slow_disk_has_until_the_checkpoint_deadline(pool: MegatronPool, tmp_path: Path) -> None:
    """One worker's disk is slower than the deadline of collectives."""
    directory = str(tmp_path / "checkpoint")
    with pool.group(DP2, reference.make_config(pool.models["qwen3"])) as group:
        before = group.call("state")
        group.call("shorten_collectives", 1.5)
        group.call("slow_disk", per_rank=[(0.0,), (2.0,)])
        group.call("save_checkpoint", directory)
        group.call("load_checkpoint", directory)
        _assert_same_states(group.call("state"), before)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_of_one_worker_raises_on_all(background: bool, pool: MegatronPool, tmp_path: Path) -> None:
    """The next save works."""
    with pool.group(DP2, reference.make_config(pool.models["qwen3"])) as group:
        before = group.call("state")
        group.call("fill_disk", per_rank=[(False,), (True,)])
        if background:
            group.call("save_checkpoint", str(tmp_path / "first"), True)
        method = ("finish_checkpoint",) if background else ("save_checkpoint", str(tmp_path / "first"))
        _fails(group, r"cannot write .*first: .*No space left on device", *method)
        group.call("save_checkpoint", str(tmp_path / "second"))
        group.call("load_checkpoint", str(tmp_path / "second"))
        _assert_same_states(group.call("state"), before)


def test_a_stuck_save_is_an_error_after_the_deadline(pool: MegatronPool, tmp_path: Path) -> None:
    with pool.group(SINGLE, reference.make_config(pool.models["qwen3"])) as group:
        group.call("stall_writing")
        group.call("shorten_checkpoints", 0.5)
        group.call("save_checkpoint", str(tmp_path / "checkpoint"), True)
        with pytest.raises(WorkerError, match=r"checkpoint is not written after [01] s; .*Raise timeouts\.checkpoint_s"):
            group.call("finish_checkpoint")
        group.call("release_writing")


def test_a_checkpoint_that_does_not_fit_is_rejected(pool: MegatronPool, tmp_path: Path) -> None:
    """On every worker, with its state unchanged. tests/unit/workers/test_train_checkpoint.py has other models."""
    directory = tmp_path / "checkpoint"
    with pool.group(DP2, reference.make_config(pool.models["qwen3"])) as group:
        group.call("save_checkpoint", str(directory))
        before = group.call("state")
        _fails(group, r"cannot read .*worker\.json", "load_checkpoint", str(tmp_path / "nothing"))
        metadata = (directory / ".metadata").read_bytes()
        (directory / ".metadata").write_bytes(metadata.replace(b"final_layernorm", b"final_layernorX"))
        _fails(group, r"cannot load .*: it has no .*final_layernorm", "load_checkpoint", str(directory))
        (directory / ".metadata").write_bytes(metadata)
        _assert_same_states(group.call("state"), before)


def _fails(group: Group, message: str, method: str, *args: str) -> None:
    """Checks that every worker raises, including those that could go on."""
    for rank in range(2):
        group.start(rank, method, *args)
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


ALL = ("weights", "gradients", "optimizer")
BFLOAT16_SHARDED = {"precision": "bfloat16", "sharded": True}
SHARDED_STATE = {"sharded": True}
OFFLOADED = [
    pytest.param("qwen3", ParallelLayout(tp=2), {}, id="tp2", marks=pytest.mark.slow),
    pytest.param("qwen3", ParallelLayout(dp=2), BFLOAT16_SHARDED, id="dp2-bfloat16-sharded"),
    pytest.param("qwen3_moe", ParallelLayout(dp=2, ep=2), SHARDED_STATE, id="moe-ep2-sharded"),
]


@pytest.mark.parametrize(("model", "layout", "policy"), OFFLOADED)
def test_training_continues_unchanged_after_offloading(
    model: str, layout: ParallelLayout, policy: dict[str, Any], pool: MegatronPool
) -> None:
    batch, config = reference.make_batch(), reference.make_config(pool.models[model], **policy)
    with pool.group(layout, config) as group:
        train(group, batch)
        undisturbed = [logprobs(group, batch)["logprobs"], train(group, batch), train(group, batch)]
    with pool.group(layout, config) as group:
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


def test_a_warm_up_of_offloading_moves_nothing(pool: MegatronPool) -> None:
    batch, config = reference.make_batch(), reference.make_config(pool.models["qwen3"])
    with pool.group(ParallelLayout(), config) as group:
        resident = group.call("resident_bytes")
        group.call("prepare_for_logprobs", 0, warmup=True)
        assert group.call("resident_bytes") == resident
        train(group, batch)
