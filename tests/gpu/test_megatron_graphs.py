"""Passes replayed as CUDA graphs, against plain torch and passes without graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import ReplayContext, replay_context
from dagrl.telemetry.metrics import merge_step_metrics
from tests.gpu import needs_gpus
from tests.gpu.test_megatron_nccl import check_abort
from tests.integration import megatron_reference as reference
from tests.integration.train_cases import UNCLIPPED, Case, megatron, plain_torch, run_case, train
from tests.integration.train_pool import WorkerPool
from tests.integration.train_workers import TestedMegatronWorker, single_worker

pytest.importorskip("megatron.core")
GRAPHS = {"cuda_graphs": True}


def recorded(model: str, **keys: Any) -> Case:
    return megatron(model, section=GRAPHS, **keys)


ONE = [recorded("qwen3"), recorded("qwen3_tied")]
TWO = [recorded("qwen3_tied", tp=2), recorded("qwen3", sequence_parallel=True, tp=2), recorded("qwen3", sharded=True, dp=2)]
HALF = [recorded("qwen3", packed=True), recorded("qwen3_moe"), recorded("qwen3_moe", packed=True)]
HALF_ON_TWO = [
    recorded("qwen3", cp=2),
    recorded("qwen3", packed=True, cp=2),
    recorded("qwen3", sequence_parallel=True, packed=True, tp=2),
]


def on_two(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=needs_gpus(2)) for case in cases]


@pytest.mark.parametrize("case", [*ONE, *on_two(TWO)], ids=str)
def test_three_steps_match_plain_torch(case: Case, pool: WorkerPool) -> None:
    """The first pass of a shape is not recorded; the three steps' passes are."""
    reference.assert_near_float32(run_case(pool, case), plain_torch(pool.models[case.model]))


@pytest.mark.parametrize("case", [*ONE, *HALF, *on_two([*TWO, *HALF_ON_TWO])], ids=str)
def test_bfloat16_is_close_to_float32(case: Case, pool: WorkerPool) -> None:
    found = run_case(pool, case, precision="bfloat16")
    assert not reference.beyond_bfloat16(found, plain_torch(pool.models[case.model]))


def lengths_batch(lengths: list[int], seed: int) -> Batch:
    """Rows of these lengths with the fields of a GRPO loss."""
    generator, shape = np.random.default_rng(seed), (len(lengths), max(lengths))
    mask = (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.float32)
    mask[:, 0] = 0
    fields = {"tokens": generator.integers(0, reference.VOCABULARY, shape), "lengths": np.array(lengths), "loss_mask": mask}
    for name in ("generation_logprobs", "prev_logprobs", "reference_logprobs"):
        fields[name] = generator.normal(-5.3, 0.3, shape).astype(np.float32) * mask
    fields["advantages"] = generator.normal(size=(shape[0], 1)).astype(np.float32) * mask
    return Batch(fields, {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float(shape[0])})


BATCHES = [[40, 3, 9], [17, 5, 2, 2, 2, 2, 3, 4, 1, 1, 2], [40, 40], [1, 1, 2], [30, 10, 20, 20, 5, 35]]
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}}


def test_replays_take_packed_sequences_of_any_number_and_length(models: dict[str, Path]) -> None:
    """Returns gradients and log-probabilities of batches with few and many sequences, three times each."""
    found: dict[bool, list[Any]] = {}
    counts = []
    for graphs in (False, True):
        megatron = {"cuda_graphs": graphs}
        config = reference.make_config(
            models["qwen3"], precision="bfloat16", megatron_cfg=megatron, optimizer=UNCLIPPED, **PACKED
        )
        results = found[graphs] = []
        with single_worker(config, TestedMegatronWorker) as made:
            for number, lengths in enumerate(BATCHES * 3):
                batch = lengths_batch(lengths, number % len(BATCHES))
                rows = made.logprobs(batch)
                made.train_step(batch.with_scalars(lr=0.0), "policy")
                results.append((rows, reference.assemble([made.gradients()])))
                counts.append(made.recordings() if graphs else 0)
    assert counts[-1] > 2 and counts[-1] == counts[-1 - len(BATCHES)]  # all that the last round replayed was there
    for (rows, gradients), (expected_rows, expected_gradients) in zip(found[True], found[False], strict=True):
        np.testing.assert_allclose(rows["logprobs"], expected_rows["logprobs"], atol=1e-3, rtol=0)
        np.testing.assert_allclose(rows["entropy"], expected_rows["entropy"], atol=1e-3, rtol=0)
        norm = np.sqrt(sum(float(np.square(value).sum()) for value in expected_gradients.values()))
        for name, value in expected_gradients.items():
            assert float(np.linalg.norm(gradients[name] - value)) < 1e-3 * norm, name


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_replays_count_tokens_of_experts(name: str, models: dict[str, Path]) -> None:
    """Metrics of the load over batches of 8 and of 7 rows that share recordings."""
    found: dict[bool, list[Any]] = {}
    for graphs in (False, True):
        megatron = {"cuda_graphs": graphs, "moe_aux_loss_coeff": 1e-2}
        config = reference.make_config(models[name], precision="bfloat16", megatron_cfg=megatron, optimizer=UNCLIPPED)
        found[graphs] = []
        with single_worker(config, TestedMegatronWorker) as made:
            for seed in range(6):
                batch = lengths_batch([22, 5, 17, 3, 21, 9, 4, 13][: 8 - seed % 2], seed % 2)
                metrics = merge_step_metrics([made.train_step(batch.with_scalars(lr=0.0), "policy")]).flat()
                load = {key: value for key, value in metrics.items() if key.startswith("moe/")}
                found[graphs].append((load, reference.assemble([made.gradients()])))
            assert not graphs or made.recordings() == 1
    for (load, gradients), (expected_load, expected) in zip(found[True], found[False], strict=True):
        assert load == pytest.approx(expected_load, rel=2e-2) and load["moe/max_load"] > 1
        norm = np.sqrt(sum(float(np.square(value).sum()) for value in expected.values()))
        difference = np.sqrt(sum(float(np.square(gradients[key] - value).sum()) for key, value in expected.items()))
        assert difference < 2e-2 * norm


def test_a_warm_up_records_and_changes_nothing(models: dict[str, Path]) -> None:
    config = reference.make_config(models["qwen3"], precision="bfloat16", megatron_cfg=dict(GRAPHS))
    batch = reference.make_batch()
    with single_worker(config, TestedMegatronWorker) as made:
        before = made.state()
        with replay_context(ReplayContext("test", 0, True)):
            made.logprobs(batch)
            made.train_step(batch, "likelihood")
        after = made.state()
        recordings = made.recordings()
        made.logprobs(batch)
        made.train_step(batch, "likelihood")
        assert made.recordings() == recordings >= 2
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize("where", ["host", "device"])
def test_replays_follow_swapped_and_offloaded_weights(where: str, models: dict[str, Path]) -> None:
    config = reference.make_config(models["qwen3"], precision="bfloat16", reference_weights=where, megatron_cfg=dict(GRAPHS))
    batch = reference.make_batch()
    with single_worker(config, TestedMegatronWorker) as made:
        first = made.own_logprobs(batch)
        made.snapshot_reference()
        for _ in range(3):
            made.train_step(batch, "likelihood")
        learned = made.own_logprobs(batch)
        for _ in range(3):
            np.testing.assert_allclose(made.own_logprobs(batch, "reference"), first, atol=1e-3)
            np.testing.assert_allclose(made.own_logprobs(batch), learned, atol=1e-3)
        made.offload(("weights", "gradients", "optimizer"))
        blocker = torch.empty(1 << 26, device="cuda")  # so that they come back elsewhere
        made.reload(("weights", "gradients", "optimizer"))
        assert made.recordings() == 0
        for _ in range(3):
            np.testing.assert_allclose(made.own_logprobs(batch), learned, atol=1e-3)
            metrics = made.train_step(batch.with_scalars(lr=0.0), "likelihood")
        del blocker
    assert np.abs(learned - first).max() > 1e-2
    assert np.isfinite(metrics.sums["loss"])


@needs_gpus(2)
def test_an_abort_ends_a_replayed_collective_without_peers(pool: WorkerPool) -> None:
    batch, case = reference.make_batch(), recorded("qwen3", tp=2)
    with case.group(pool, optimizer=UNCLIPPED) as group:
        for _ in range(3):
            train(group, batch)
            group.call("logprobs", batch)
        assert min(group.call("recordings")) >= 2
        check_abort(group, batch)
        group.call("abort")
    with case.group(pool, optimizer=UNCLIPPED) as group:  # nothing is left of the broken groups
        assert group.call("logprobs", batch)[0] is not None
