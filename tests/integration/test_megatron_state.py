"""State of a Megatron worker: steps, warm-ups that change nothing, aborts, failed starts; experts, and refits from it."""

import gc
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dagrl.channels import ChannelSpec, open_channel
from dagrl.refit import RefitPlan, RefitReceiver, plan_refit
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.store import reserve_port
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.test_train_checkpoint import DP2, assert_same_states
from tests.integration.train_cases import UNCLIPPED, Case, each, gradients_of, logprobs, megatron, plain_torch, train
from tests.integration.train_pool import Group, WorkerError, WorkerPool
from tests.integration.train_workers import TestedMegatronWorker, single_worker
from tests.integration.vllm_models import whole_model
from tests.unit.workers.test_megatron_architecture import REAL_CASES

TP2 = megatron("qwen3", tp=2)


@each([DP2, megatron("qwen3", dp=2, sharded=True)])
def test_a_warm_up_changes_nothing(case: Case, pool: WorkerPool) -> None:
    batch = reference.make_batch()
    with case.group(pool) as group:
        fresh = group.call("state")
        assert any(name.startswith("exp_avg.") for name in fresh[0])  # created before the first step
        train(group, batch, warmup=True)
        assert_same_states(group.call("state"), fresh)
        train(group, batch)
        trained = group.call("state")
        assert trained[0]["steps"] == 1
        train(group, batch, warmup=True)
        train(group, batch.with_scalars(global_valid_tokens=1e-45), warmup=True)  # not even a step that would be skipped
        logprobs(group, batch)
        assert_same_states(group.call("state"), trained)


@pytest.mark.parametrize(("sizes", "microbatches"), [({}, 3), ({"pp": 2, "vpp": 2}, 4)], ids=["single", "pp2vpp2"])
def test_a_warm_up_runs_few_microbatches(sizes: dict[str, int], microbatches: int, pool: WorkerPool) -> None:
    """Of a batch of eight, in each of four layers. Results have the whole batch's shape."""
    batch = reference.make_batch()
    with megatron("qwen3", **sizes).group(pool, train_micro_batch_size=1) as group:
        for warmup, expected in ((True, microbatches), (False, reference.ROWS)):
            runs = group.call("attention_runs", batch, warmup=warmup)
            assert [count for stage in runs for count in stage] == [expected] * 4
        found = [part for part in group.call("logprobs", batch, warmup=True) if part is not None]
        assert [part["logprobs"].shape for part in found] == [batch["tokens"].shape]


def test_a_worker_that_runs_out_of_memory_is_aborted(pool: WorkerPool) -> None:
    with megatron("qwen3").group(pool) as group:
        group.call("exceed_memory", reference.make_batch(), warmup=True)
        with pytest.raises(WorkerError, match="aborted"):
            group.call("attention_runs", reference.make_batch(), warmup=True)


def test_a_step_with_infinite_gradients_is_skipped_and_counted(pool: WorkerPool) -> None:
    batch = reference.make_batch()
    with DP2.group(pool) as group:
        before = group.call("state")
        skipped = train(group, batch.with_scalars(global_valid_tokens=1e-45))
        assert skipped["skipped_steps"] == 1 and not np.isfinite(skipped["grad_norm"])
        assert_same_states(group.call("state"), [{**state, "skipped": 1} for state in before])
        following = train(group, batch)
        assert following["skipped_steps"] == 1 and np.isfinite(following["loss"])


def test_steps_below_bfloat16_precision_accumulate(pool: WorkerPool) -> None:
    """Steps below bfloat16's precision add up only in float32 master weights."""
    optimizer, batch = {"lr": 1e-5, "weight_decay": 0.0}, reference.make_batch()
    with DP2.group(pool, precision="bfloat16", optimizer=optimizer) as group:
        exact = logprobs(group, batch)
        masters = {name: value for name, value in group.call("state")[0].items() if name.startswith("master.")}
        for _ in range(3):
            train(group, batch)
        moved = group.call("state")[0]
        group.call("reset_optimizer")
        began_anew = group.call("state")[0]
    with torch.no_grad():
        expected, _ = reference.hf_logprobs(reference.load_model(pool.models["qwen3"]), batch)
    np.testing.assert_allclose(exact["logprobs"], expected.numpy(), atol=0.1)
    steps = np.concatenate([np.abs(moved[name] - value).ravel() for name, value in masters.items()])
    assert 1e-6 < np.median(steps[steps > 0]) < 4e-5
    assert not any(value.any() for name, value in began_anew.items() if name.startswith(("exp_avg", "step.")))
    for name in masters:  # as if training started with the current weights
        rounded = torch.from_numpy(moved[name]).bfloat16().float().numpy()
        assert (rounded != moved[name]).any()
        np.testing.assert_array_equal(began_anew[name], rounded, err_msg=name)


@pytest.mark.parametrize("aborted", [0, 1], ids=["peer", "itself"])
def test_waiting_for_or_in_an_aborted_worker_raises_at_once(aborted: int, pool: WorkerPool) -> None:
    batch = reference.make_batch()
    with TP2.group(pool) as group:
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
    with TP2.group(pool) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None


def test_weight_decay_affects_only_matrices(pool: WorkerPool) -> None:
    """AdamW's first step in closed form: the gradient's sign times the rate, plus decay."""
    rate, decay, eps = 1e-2, 0.5, 1e-8
    optimizer = UNCLIPPED | {"lr": rate, "weight_decay": decay, "adam_eps": eps}
    batch, case = reference.make_batch(), megatron("qwen2", dp=2, sharded=True)  # with biases
    gradients = plain_torch(pool.models["qwen2"]).gradients
    threads = group_threads(pool)
    with case.group(pool, optimizer=optimizer) as group:
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


def group_threads(pool: WorkerPool) -> list[int]:
    tasks = [Path(f"/proc/{pid}/task").glob("*/comm") for pid in pool.pids]
    return [sum("gloo" in name.read_text() for name in names) for names in tasks]


def test_only_gradients_above_the_limit_are_clipped(pool: WorkerPool) -> None:
    found, truth = {}, plain_torch(pool.models["qwen3"])
    for limit in (0.25, 10.0):
        with megatron("qwen3").group(pool, optimizer={"clip_grad": limit}) as group:
            norm = train(group, reference.make_batch())["grad_norm"]
            found[limit] = gradients_of(group)
    assert norm == pytest.approx(truth.norms[0], rel=1e-4) and 0.25 < norm < 10.0
    for name, gradient in truth.gradients.items():
        np.testing.assert_allclose(found[0.25][name], gradient * (0.25 / norm), atol=1e-6, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found[10.0][name], gradient, atol=1e-5, rtol=1e-4, err_msg=name)


def test_a_step_without_gradients_is_skipped_and_counted(pool: WorkerPool) -> None:
    batch = reference.make_batch(grpo=True)
    equal = batch.with_fields(advantages=np.zeros_like(batch["advantages"]))
    with DP2.group(pool, generation={"temperature": 0.7}) as group:
        group.call("set_loss", {"reference_policy_kl_penalty": 0.0})
        train(group, batch, "policy")  # creates moments, which would move the weights
        before = group.call("weights")
        skipped = train(group, equal, "policy")
        assert (skipped["grad_norm"], skipped["skipped_steps"]) == (0.0, 1)
        for mine, theirs in zip(group.call("weights"), before, strict=True):
            for (name, _, values), (_, _, kept) in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(values, kept, err_msg=name)
        assert train(group, batch, "policy")["skipped_steps"] == 1


def test_adam_is_torchs_even_with_transformer_engine(pool: WorkerPool) -> None:
    """Transformer Engine and Apex keep step counts elsewhere, so checkpoints would contain 0."""
    with megatron("qwen3").group(pool) as group:
        assert group.call("optimizers_beside_another_adam") == [{"torch.optim.adamw.AdamW"}]


@pytest.mark.slow
def test_train_workers_that_find_no_weights_can_be_set_up_again(pool: WorkerPool, tmp_path: Path) -> None:
    """They have joined their groups and built the model by then; no group, and no thread of one, is left."""
    batch = reference.make_batch()
    shutil.copy(pool.models["qwen3"] / "config.json", tmp_path)
    with TP2.group(pool) as group:
        expected = group.call("logprobs", batch)
    before = group.call("threads")
    for _ in range(2):
        with (
            pytest.raises(WorkerError, match="cannot read the weights in"),
            pool.group(ParallelLayout(tp=2), TP2.config(tmp_path)),
        ):
            pass
    assert all(now <= then for now, then in zip(group.call("threads"), before, strict=True))
    with TP2.group(pool) as group:
        found = group.call("logprobs", batch)
    assert (found[0]["logprobs"] == expected[0]["logprobs"]).all()


@pytest.mark.slow
def test_a_train_worker_whose_peers_were_missing_joins_them_later(pool: WorkerPool) -> None:
    config, layout, address = TP2.config(pool.models["qwen3"]), ParallelLayout(tp=2), f"127.0.0.1:{reserve_port()}"
    place = WorkerContext("train", 0, layout, config.seed, 2.0)
    with pytest.raises(WorkerError, match=r"1/2 clients joined"):
        Group(pool.connections[:1], layout).call("new", place, config, address, "megatron policy")
    with pool.group(layout, config, timeout_s=20.0) as group:
        assert group.call("logprobs", reference.make_batch())[0] is not None


def assert_joined(worker: TestedMegatronWorker) -> None:
    """Checks that weights and gradients of a layer's experts are views of one tensor, as the grouped product needs."""
    from dagrl.workers.megatron.experts import GroupedExperts, joined

    for layer in worker.modules(GroupedExperts):
        for kind in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, kind).weight for expert in layer.local_experts]
            assert joined(weights) is not None and joined([weight.main_grad for weight in weights]) is not None


def test_a_worker_keeps_no_memory_after_shutdown(tiny_models: dict[str, Path]) -> None:
    """The process may serve another model next."""
    pytest.importorskip("megatron.core")
    with single_worker(reference.make_config(tiny_models["qwen3_moe"]), TestedMegatronWorker) as made:
        assert_joined(made)
        made.train_step(reference.make_batch(), "likelihood")
        trainer = made.trainer
        held = [*trainer.model.parameters().values(), *trainer.state("gradients"), *trainer.state("optimizer")]
        alive = [weakref.ref(tensor) for tensor in held]
        del trainer, held
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]


WITHOUT_COLLECTIONS = "import gc, runpy, sys; gc.disable(); runpy.run_module(sys.argv[1], run_name='__main__')"


def test_names_shapes_and_elements_match_megatron_core() -> None:
    """All ranks of several layouts, built one after the other in one process over torch's fake process group."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, "-c", WITHOUT_COLLECTIONS, "tests.unit.workers.megatron_shapes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("agrees") == len(REAL_CASES)


WIDE = 80  # 8 rows with 94 tokens: 85 % padding


def run(group: Group, batch: Batch) -> tuple[dict[str, float], dict[str, Any], Any, Any]:
    """Returns metrics and gradients of a step without update, log-probabilities, and the tokens of each expert."""
    (scored,), (counts,) = group.call("logprobs", batch), group.call("tokens_of_experts", batch)
    metrics = merge_step_metrics(group.call("train_step", batch, "likelihood", warmup="whole")).flat()
    return metrics, gradients_of(group), scored["logprobs"], counts


@each([megatron("qwen3_many_experts"), megatron("mixtral", slow=True)])
def test_padding_adds_nothing_and_is_spread_over_the_experts(case: Case, pool: WorkerPool) -> None:
    """Compares with the same rows one by one, each at its own width."""
    batch = reference.make_batch()
    alone = [batch.select([row]) for row in range(reference.ROWS)]
    with case.group(pool, optimizer=UNCLIPPED) as group:
        found, gradients, logprobs, counts = run(group, reference.padded(batch, Bucket(reference.ROWS, WIDE)))
        tight = [run(group, reference.padded(row, Bucket(1, int(row["lengths"][0])))) for row in alone]
    assert found["microbatch_padding_share"] > 0.8
    assert {metrics["microbatch_padding_share"] for metrics, *_ in tight} == {0.0}
    assert found["loss"] == pytest.approx(sum(metrics["loss"] for metrics, *_ in tight), abs=1e-5)
    reference.assert_gradients(gradients, {name: sum(part[name] for _, part, *_ in tight) for name in gradients}, 1e-4)
    for row, (_, _, expected, _) in enumerate(tight):
        length = expected.shape[1]
        np.testing.assert_allclose(logprobs[row, :length], expected[0], atol=1e-4, rtol=0)
        assert not logprobs[row, length:].any()
    own = sum(part for *_, part in tight)
    for padded, exact in zip(counts / counts.sum(1, keepdims=True), own / own.sum(1, keepdims=True), strict=True):
        assert padded.max() < 1.25 * exact.max()


@each([megatron("qwen3_tied", tp=2, pp=2), megatron("qwen3_moe", dp=2, ep=2)])
def test_weights_after_each_step_arrive(case: Case, pool: WorkerPool) -> None:
    batch = reference.make_batch()
    with case.group(pool) as group:
        weights = reference.assemble(group.call("weights"))
        received = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
        plan = plan_refit(group.call("weight_slices"), [whole_model(received)], dtype="float32")
        with receiving(group, plan, received) as receive:
            group.call("snapshot_reference")
            for version in (1, 2):
                train(group, batch)
                logprobs(group, batch, "reference")  # temporarily points the parameters elsewhere
                reports = receive(version)
                assert sum(report.bytes_sent for report in reports) == 4 * sum(one.numel() for one in received.values())
                for name, expected in reference.assemble(group.call("weights")).items():
                    np.testing.assert_array_equal(received[name].numpy(), expected, err_msg=name)
        if case.model == "qwen3_moe":
            check_aborts(group, batch)


@contextmanager
def receiving(group: Group, plan: RefitPlan, received: dict[str, torch.Tensor]) -> Iterator[Callable[[int], Any]]:
    """Connects a group to a receiver in this process. Gives a function that runs the refit of a version."""
    size, address = plan.size, f"127.0.0.1:{reserve_port()}"
    specs = [ChannelSpec("gloo", address, rank, size, 30.0) for rank in range(size)]
    for rank in range(size - 1):
        group.start(rank, "prepare_refit", plan.for_rank(rank), specs[rank])
    channel = open_channel(specs[-1])
    for rank in range(size - 1):
        group.finish(rank)
    receiver = RefitReceiver(plan.for_rank(size - 1), received, channel)

    def receive(version: int) -> Any:
        thread = threading.Thread(target=receiver.receive, args=(version,))
        thread.start()
        reports = group.call("send_weights", version)
        thread.join(30)
        return reports

    yield receive
    channel.close()


def check_aborts(group: Group, batch: Batch) -> None:
    """Checks that an abort after a failed refit does not affect training, and that a later one does."""
    with pytest.raises(WorkerError, match="ChannelError"):
        group.call("send_weights", 3)
    group.call("abort")
    train(group, batch)
    group.call("abort")
    with pytest.raises(WorkerError, match="was aborted; restart the group"):
        train(group, batch)
