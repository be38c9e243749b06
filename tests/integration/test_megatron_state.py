"""State of a Megatron worker: exports, reference policy, optimizer steps, warm-ups that change nothing, failed starts."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dagrl.config import LossConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool, WorkerError
from tests.integration.test_megatron_layouts import UNCLIPPED, logprobs, train

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
def test_an_export_equals_the_import(model: str, layout: ParallelLayout, pool: MegatronPool, tmp_path: Path) -> None:
    with pool.group(layout, reference.make_config(pool.models[model])) as group:
        group.call("export_hf", str(tmp_path))
    imported, exported = load_file(pool.models[model] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(imported) == set(exported)
    for name, tensor in imported.items():
        assert torch.equal(tensor, exported[name]), name


def test_an_export_to_a_full_disk_raises_on_all_workers_at_once(pool: MegatronPool, tmp_path: Path) -> None:
    """The writing worker fails. No other worker waits until the deadline, and the next export works."""
    with pool.group(TP2PP2, reference.make_config(pool.models["qwen3"])) as group:
        for rank in range(4):
            group.start(rank, "export_to_a_full_disk", str(tmp_path / "out"), 60_000)
        for rank in range(4):
            with pytest.raises(WorkerError, match=r"cannot write .*out\.partial: .*No space left on device") as caught:
                group.finish(rank, timeout_s=30)
            assert caught.value.kind == "CheckpointError"
        assert not (tmp_path / "out").exists()
        group.call("export_hf", str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_trained_policy_in_several_files_loads_in_transformers(pool: MegatronPool, tmp_path: Path) -> None:
    batch = reference.make_batch()
    with pool.group(TP2PP2, reference.make_config(pool.models["qwen3_tied"])) as group:
        train(group, batch)
        trained = logprobs(group, batch)
        group.call("export_in_files", str(tmp_path), 60_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected, _ = reference.hf_logprobs(model, batch)
    np.testing.assert_allclose(trained["logprobs"], expected.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_warm_up_changes_nothing(sharded: bool, pool: MegatronPool) -> None:
    config = reference.make_config(pool.models["qwen3"], sharded=sharded)
    batch = reference.make_batch()
    with pool.group(DP2, config) as group:
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
    ("layout", "microbatches"), [(ParallelLayout(), 3), (ParallelLayout(pp=2, vpp=2), 4)], ids=["single", "pp2vpp2"]
)
def test_a_warm_up_runs_few_microbatches(layout: ParallelLayout, microbatches: int, pool: MegatronPool) -> None:
    """Of a batch of eight, in each of four layers. Results have the whole batch's shape."""
    batch = reference.make_batch()
    with pool.group(layout, reference.make_config(pool.models["qwen3"], train_micro_batch_size=1)) as group:
        for warmup, expected in ((True, microbatches), (False, reference.ROWS)):
            runs = group.call("attention_runs", batch, warmup=warmup)
            assert [count for stage in runs for count in stage] == [expected] * 4
        found = [part for part in group.call("logprobs", batch, warmup=True) if part is not None]
        assert [part["logprobs"].shape for part in found] == [batch["tokens"].shape]


def test_a_worker_that_runs_out_of_memory_is_aborted(pool: MegatronPool) -> None:
    with pool.group(ParallelLayout(), reference.make_config(pool.models["qwen3"])) as group:
        group.call("exceed_memory", reference.make_batch(), warmup=True)
        with pytest.raises(WorkerError, match="aborted"):
            group.call("attention_runs", reference.make_batch(), warmup=True)


def _assert_same_states(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)


def test_a_step_with_infinite_gradients_is_skipped_and_counted(pool: MegatronPool) -> None:
    batch = reference.make_batch()
    with pool.group(DP2, reference.make_config(pool.models["qwen3"])) as group:
        before = group.call("state")
        skipped = train(group, batch.with_scalars(global_valid_tokens=1e-45))
        assert skipped["skipped_steps"] == 1 and not np.isfinite(skipped["grad_norm"])
        _assert_same_states(group.call("state"), [{**state, "skipped": 1} for state in before])
        following = train(group, batch)
        assert following["skipped_steps"] == 1 and np.isfinite(following["loss"])


def test_steps_below_bfloat16_precision_accumulate(pool: MegatronPool) -> None:
    """Steps below bfloat16's precision add up only in float32 master weights."""
    optimizer = {"lr": 1e-5, "weight_decay": 0.0}
    config = reference.make_config(pool.models["qwen3"], precision="bfloat16", optimizer=optimizer)
    batch = reference.make_batch()
    with pool.group(DP2, config) as group:
        exact = logprobs(group, batch)
        masters = {name: value for name, value in group.call("state")[0].items() if name.startswith("master.")}
        for _ in range(3):
            train(group, batch)
        moved = group.call("state")[0]
        group.call("reset_optimizer")
        began_anew = group.call("state")[0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(pool.models["qwen3"], dtype=torch.float32)
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
def test_waiting_for_or_in_an_aborted_worker_raises_at_once(aborted: int, pool: MegatronPool) -> None:
    batch, config = reference.make_batch(), reference.make_config(pool.models["qwen3"])
    with pool.group(ParallelLayout(tp=2), config) as group:
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
    with pool.group(ParallelLayout(tp=2), config) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None


def test_weight_decay_affects_only_matrices(pool: MegatronPool) -> None:
    """AdamW's first step in closed form: the gradient's sign times the rate, plus decay."""
    rate, decay, eps = 1e-2, 0.5, 1e-8
    optimizer = UNCLIPPED | {"lr": rate, "weight_decay": decay, "adam_eps": eps}
    batch = reference.make_batch()
    config = reference.make_config(pool.models["qwen2"], optimizer=optimizer, sharded=True)  # with biases
    gradients = reference.train_reference(pool.models["qwen2"], batch, config, reference.sft_reference).gradients
    threads = group_threads(pool)
    with pool.group(ParallelLayout(dp=2), config) as group:
        train(group, batch)
        after = reference.assemble(group.call("weights"))
    left = np.subtract(group_threads(pool), threads)
    assert left.max() <= 3, "of a sharded optimizer's groups none stays, at most torch's first one with its three threads"
    before = load_file(pool.models["qwen2"] / "model.safetensors")
    assert {values.ndim for values in gradients.values()} == {1, 2}
    for name, gradient in gradients.items():
        start = before[name].numpy()
        expected = start - rate * gradient / (np.abs(gradient) + eps) - (rate * decay * start if gradient.ndim > 1 else 0)
        clear = np.abs(gradient) > 1e-4  # the sign of nearly 0 is rounding noise
        assert clear.any()
        np.testing.assert_allclose(after[name][clear], expected[clear], atol=2e-5, rtol=0, err_msg=name)


def group_threads(pool: MegatronPool) -> list[int]:
    tasks = [Path(f"/proc/{pid}/task").glob("*/comm") for pid in pool.pids]
    return [sum("gloo" in name.read_text() for name in names) for names in tasks]


def test_only_gradients_above_the_limit_are_clipped(pool: MegatronPool) -> None:
    batch, found = reference.make_batch(), {}
    limits = {"scaled": 0.25, "within": 10.0}
    configs = {
        name: reference.make_config(pool.models["qwen3"], optimizer={"clip_grad": value}) for name, value in limits.items()
    }
    for name, config in configs.items():
        with pool.group(ParallelLayout(), config) as group:
            norm = train(group, batch)["grad_norm"]
            found[name] = reference.assemble(group.call("gradients"))
    assert limits["scaled"] < norm < limits["within"]
    truth = reference.train_reference(pool.models["qwen3"], batch, configs["scaled"], reference.sft_reference).gradients
    for name, gradient in truth.items():  # torch's clipping in place
        np.testing.assert_allclose(found["scaled"][name], gradient, atol=1e-6, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found["within"][name], gradient * (norm / limits["scaled"]), atol=1e-5, rtol=1e-4)


def test_a_step_without_gradients_is_skipped_and_counted(pool: MegatronPool) -> None:
    batch = reference.make_batch(grpo=True)
    config = reference.make_config(pool.models["qwen3"], generation={"temperature": 0.7})
    config = config.model_copy(update={"loss_fn": LossConfig(reference_policy_kl_penalty=0.0)})
    equal = batch.with_fields(advantages=np.zeros_like(batch["advantages"]))
    with pool.group(ParallelLayout(dp=2), config) as group:
        train(group, batch, "policy")  # creates moments, which would move the weights
        before = group.call("weights")
        skipped = train(group, equal, "policy")
        assert (skipped["grad_norm"], skipped["skipped_steps"]) == (0.0, 1)
        for mine, theirs in zip(group.call("weights"), before, strict=True):
            for (name, _, values), (_, _, kept) in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(values, kept, err_msg=name)
        assert train(group, batch, "policy")["skipped_steps"] == 1


def test_adam_is_torchs_even_with_transformer_engine(pool: MegatronPool) -> None:
    """Transformer Engine and Apex keep step counts elsewhere, so checkpoints would contain 0."""
    with pool.group(ParallelLayout(), reference.make_config(pool.models["qwen3"])) as group:
        assert group.call("optimizers_beside_another_adam") == [{"torch.optim.adamw.AdamW"}]


TP2 = ParallelLayout(tp=2)


@pytest.mark.slow
def test_train_workers_that_find_no_weights_can_be_set_up_again(pool: MegatronPool, tmp_path: Path) -> None:
    """They have joined their groups and built the model by then; no group, and no thread of one, is left."""
    good, batch = reference.make_config(pool.models["qwen3"]), reference.make_batch()
    shutil.copy(pool.models["qwen3"] / "config.json", tmp_path)
    with pool.group(TP2, good) as group:
        expected = group.call("logprobs", batch)
    before = group.call("threads")
    for _ in range(2):
        with (
            pytest.raises(WorkerError, match="cannot read the weights in"),
            pool.group(TP2, reference.make_config(tmp_path)),
        ):
            pass
    assert all(now <= then for now, then in zip(group.call("threads"), before, strict=True))
    with pool.group(TP2, good) as group:
        found = group.call("logprobs", batch)
    assert (found[0]["logprobs"] == expected[0]["logprobs"]).all()


@pytest.mark.slow
def test_a_train_worker_whose_peers_were_missing_joins_them_later(pool: MegatronPool) -> None:
    config, batch = reference.make_config(pool.models["qwen3"]), reference.make_batch()
    alone = Group(pool.connections[:1], TP2)
    with pytest.raises(WorkerError, match=r"1/2 clients joined"):
        alone.call("new", WorkerContext("train", 0, TP2, config.seed, 2.0), config, f"127.0.0.1:{reserve_port()}", "policy")
    with pool.group(TP2, config, timeout_s=20.0) as group:
        assert group.call("logprobs", batch)[0] is not None
