"""Training and log-probabilities in every layout, against Hugging Face and plain torch.

These tests detect three silent errors of Megatron: gradients of q/k norms not summed over tp (gradients, second loss), a
loss multiplied by cp (gradients at cp2), and a two-stage interleaved pipeline with batched transfers (first loss at vpp2).
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagrl.config import Config, SequencePackingConfig
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch, Bucket
from dagrl.runtime.split import split_rows
from dagrl.telemetry.metrics import merge_step_metrics
from tests.integration import megatron_reference as reference
from tests.integration.megatron_pool import Group, MegatronPool


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    layout: ParallelLayout
    megatron: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    policy: dict[str, Any] = field(default_factory=dict)


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 64}}


def case(
    model: str,
    name: str,
    sharded: bool = False,
    sequence_parallel: bool = False,
    packed: bool = False,
    overlap: bool = False,
    recomputed: bool = False,
    **sizes: int,
) -> Case:
    megatron = {"sequence_parallel": True} if sequence_parallel else {}
    megatron |= {"activation_checkpointing": True} if recomputed else {}
    megatron |= {"distributed_data_parallel_config": {"overlap_grad_reduce": True}} if overlap else {}
    policy = PACKED if packed else {}
    return Case(f"{model}-{name}", model, ParallelLayout(**sizes), megatron, sharded, policy)


CASES = [
    case("qwen3", "dp2-overlapped", overlap=True, dp=2),
    case("qwen3", "dp2-sharded-overlapped", sharded=True, overlap=True, dp=2),
    case("qwen3", "tp4", tp=4),  # two key-value heads: a worker holds part of a query group
    case("qwen3", "tp2cp2-sp-packed", sequence_parallel=True, packed=True, tp=2, cp=2),
    case("qwen3", "pp2vpp2", pp=2, vpp=2),
    case("qwen3", "pp2-uneven-recomputed", pp=2, first_stage_layers=1, recomputed=True),
    case("qwen3", "pp2cp2-packed", packed=True, pp=2, cp=2),
    case("qwen3", "tp2pp2-sharded-sp-recomputed", sharded=True, sequence_parallel=True, recomputed=True, tp=2, pp=2),
    case("qwen3", "dp2cp2-sharded-packed", sharded=True, packed=True, dp=2, cp=2),
    case("qwen3_tied", "tp2pp2", tp=2, pp=2),
    case("qwen3_tied", "dp2pp2vpp2-sharded-overlapped", sharded=True, overlap=True, dp=2, pp=2, vpp=2),
    case("qwen3_tied", "dp2pp2vpp2-packed", packed=True, dp=2, pp=2, vpp=2),
    case("qwen2", "tp2", tp=2),
    case("llama", "cp2", cp=2),
    case("mistral", "tp2-packed", packed=True, tp=2),
    case("qwen3_windows", "pp2cp2-packed", packed=True, pp=2, cp=2),
    case("qwen3_windows", "tp2", tp=2),
    case("small_vocabulary", "tp2", tp=2),
    case("qwen3_moe", "dp2ep2-overlapped", overlap=True, dp=2, ep=2),
    case("qwen3_moe", "cp2ep2", cp=2, ep=2),
    case("qwen3_moe", "tp2cp2ep2-packed", packed=True, recomputed=True, tp=2, cp=2, ep=2),
    case("qwen3_moe", "tp2ep2etp1", tp=2, ep=2, etp=1),
    case("qwen3_moe", "dp2ep2-sharded", sharded=True, dp=2, ep=2),
    case("mixtral", "single", packed=True),
    case("mixtral", "dp2tp2ep2", dp=2, tp=2, ep=2),
    case("deepseek_v3", "tp2pp2-packed", packed=True, recomputed=True, tp=2, pp=2),
    case("deepseek_v3", "dp2cp2-recomputed", recomputed=True, dp=2, cp=2),
    case("deepseek_v3", "single"),
    case("deepseek_v3_plain", "dp2tp2ep2", dp=2, tp=2, ep=2),
    case("dynamic", "single"),
    case("longrope", "single"),
    case("qwen3_moe_mixed", "dp2pp2ep2", dp=2, pp=2, ep=2),
    case("glm4_moe", "dp2tp2ep2", dp=2, tp=2, ep=2),
    case("glm4_moe_groups", "pp2cp2-packed", packed=True, recomputed=True, pp=2, cp=2),
]
SLOW = {
    *(f"qwen3-{name}" for name in ("dp2-sharded-overlapped", "pp2cp2-packed", "tp2pp2-sharded-sp-recomputed")),
    "qwen3-tp2cp2-sp-packed",
    "qwen2-tp2",
    "qwen3-tp4",
    "llama-cp2",
    "glm4_moe-dp2tp2ep2",
    "longrope-single",
    "qwen3_windows-tp2",
    *(f"deepseek_v3{name}" for name in ("-dp2cp2-recomputed", "-single", "_plain-dp2tp2ep2")),
    "qwen3_tied-dp2pp2vpp2-packed",
    "qwen3_moe-cp2ep2",
    "qwen3_moe-dp2ep2-sharded",
    "mixtral-single",
    "qwen3_moe-tp2cp2ep2-packed",
    "mixtral-dp2tp2ep2",
}
"""Cases whose parts others in CI have too."""
UNCLIPPED = {"clip_grad": 1e3}  # clipped gradients would not show that they are too large by a factor


def shard_batches(batch: Batch, layout: ParallelLayout) -> list[Batch]:
    """Returns the rows of each data-parallel shard, in a larger bucket: with two shards there are padding rows."""
    shards = split_rows(batch["lengths"], layout.dp)
    bucket = Bucket(len(shards[0]) + layout.dp - 1, reference.WIDTH)
    return [reference.padded(batch.select(rows), bucket) for rows in shards]


def train(group: Group, batch: Batch, loss: str = "likelihood", **options: Any) -> dict[str, float]:
    """Runs a step on all workers and merges the metrics like the runtime."""
    shards = shard_batches(batch, group.layout)
    per_rank = [(shards[group.layout.coordinates(rank).dp], loss) for rank in range(group.layout.world_size)]
    metrics = merge_step_metrics(group.call("train_step", per_rank=per_rank, **options)).flat()
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}  # times differ


def logprobs(group: Group, batch: Batch, *model: str) -> Batch:
    """Returns the rows of the whole batch in order, from the one reporting worker of each shard."""
    shards, rows = shard_batches(batch, group.layout), split_rows(batch["lengths"], group.layout.dp)
    per_rank = [(shards[group.layout.coordinates(rank).dp], *model) for rank in range(group.layout.world_size)]
    parts = group.call("logprobs", per_rank=per_rank)
    found = {name: np.zeros((batch.rows, batch.tokens), np.float32) for name in ("logprobs", "entropy")}
    for shard, positions in enumerate(rows):
        given = [part for rank, part in enumerate(parts) if group.layout.coordinates(rank).dp == shard and part is not None]
        assert len(given) == 1
        for name, array in found.items():
            array[positions] = given[0][name][: len(positions)]
    return batch.with_fields(**found)


def run_case(pool: MegatronPool, item: Case, model: Path, **policy: Any) -> reference.Run:
    """Runs a case on the batch, with further keys of `policy`."""
    batch = reference.make_batch(vocabulary_of(item.model))
    with pool.group(item.layout, configuration(item, model, **policy)) as group:
        first = logprobs(group, batch)
        train(group, batch, warmup="whole")  # gradients, but no update
        gradients = reference.assemble(group.call("gradients")) if not item.sharded else {}
        steps = [train(group, batch) for _ in range(reference.STEPS)]
    losses, norms = [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    return reference.Run(first["logprobs"], first["entropy"], losses, norms, gradients)


def configuration(item: Case, model: Path, **policy: Any) -> Config:
    keys = {"megatron_cfg": item.megatron, "optimizer": UNCLIPPED, **item.policy, **policy}
    return reference.make_config(model, sharded=item.sharded, **keys)


def vocabulary_of(model: str) -> int:
    return int(reference.MODELS[model].get("vocab_size", reference.VOCABULARY))


@cache
def plain_torch(directory: Path) -> reference.Run:
    """Returns what Hugging Face and plain torch give in one process."""
    batch, config = (
        reference.make_batch(vocabulary_of(directory.name)),
        reference.make_config(directory, optimizer=UNCLIPPED),
    )
    return reference.train_reference(directory, batch, config, reference.sft_reference)


@pytest.mark.parametrize(
    "item",
    [pytest.param(item, marks=[pytest.mark.slow] * (item.name in SLOW)) for item in CASES],
    ids=lambda item: item.name,
)
def test_three_steps_match_plain_torch(item: Case, pool: MegatronPool) -> None:
    """A sharded optimizer leaves each worker a part of the gradients, which are not compared then."""
    found, expected = run_case(pool, item, pool.models[item.model]), plain_torch(pool.models[item.model])
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-5, rtol=0)
    assert item.sharded or set(found.gradients) == set(expected.gradients)
    reference.assert_gradients(found.gradients, {} if item.sharded else expected.gradients, 2e-4)
    np.testing.assert_allclose(found.losses, expected.losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)
    assert expected.losses[-1] < expected.losses[0] - 0.01


IN_BFLOAT16 = [
    case("qwen3", "single"),
    case("qwen3", "dp2-sharded", sharded=True, dp=2),
    case("qwen3_tied", "tp2", tp=2),
    case("qwen3_moe", "dp2ep2", dp=2, ep=2),
]


@pytest.mark.parametrize("item", IN_BFLOAT16, ids=lambda item: item.name)
def test_bfloat16_is_close_to_float32(item: Case, pool: MegatronPool) -> None:
    """By bounds that a model without attention violates."""
    found = run_case(pool, item, pool.models[item.model], precision="bfloat16")
    assert not reference.beyond_bfloat16(found, plain_torch(pool.models[item.model]))


@pytest.mark.parametrize(("recomputed", "twice"), [(True, 4), (False, 0)], ids=["all", "none"])
def test_activations_are_recomputed_where_asked(recomputed: bool, twice: int, pool: MegatronPool) -> None:
    """Each layer runs once per microbatch, and again in the backward pass. Cases above check the gradients."""
    item = case("qwen3", "recomputed", recomputed=recomputed)
    with pool.group(item.layout, configuration(item, pool.models["qwen3"])) as group:
        (runs,) = group.call("attention_runs", reference.make_batch())
    once = reference.ROWS // 2  # microbatches
    assert runs == [2 * once] * twice + [once] * (4 - twice)


GRPO_CASES = [  # sequences counted over a batch split by rows or by tokens
    pytest.param(ParallelLayout(dp=2), False, id="dp2-sequences"),
    pytest.param(ParallelLayout(tp=2, pp=2), True, id="tp2pp2-tokens"),
]


@pytest.mark.parametrize(("layout", "token_level"), GRPO_CASES)
def test_grpo_steps_match_plain_torch(layout: ParallelLayout, token_level: bool, pool: MegatronPool) -> None:
    batch = reference.make_batch(grpo=True)
    config = reference.make_config(pool.models["qwen3"], generation={"temperature": 0.7})
    config = config.model_copy(update={"loss_fn": config.loss_fn.model_copy(update={"token_level_loss": token_level})})

    def loss(current: Tensor, batch: Batch) -> Tensor:
        return grpo_reference(current, batch, token_level)

    expected = reference.train_reference(pool.models["qwen3"], batch, config, loss)
    with pool.group(layout, config) as group:
        train(group, batch, "policy", warmup="whole")
        gradients = reference.assemble(group.call("gradients"))
        steps = [train(group, batch, "policy") for _ in range(reference.STEPS)]
    np.testing.assert_allclose([step["loss"] for step in steps], expected.losses, atol=1e-5, rtol=0)
    reference.assert_gradients(gradients, expected.gradients, 2e-4)


def grpo_reference(current: Tensor, batch: Batch, token_level: bool) -> Tensor:
    """Clipped ratio and 0.01 x k3, averaged over tokens or over sequences' means."""
    mask, previous, fixed, advantages = (
        torch.tensor(batch[name]) for name in ("loss_mask", "prev_logprobs", "reference_logprobs", "advantages")
    )
    ratio = (current - previous).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    divergence = (fixed - current).exp() - (fixed - current) - 1
    token = (policy + 0.01 * divergence) * mask
    if token_level:
        return token.sum() / mask.sum()
    counts = mask.sum(1)
    return (token.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


SHARED_PREFIXES = [
    ("qwen3_windows", ParallelLayout()),
    ("qwen3", ParallelLayout(dp=2, tp=2)),
    pytest.param("qwen3", ParallelLayout(pp=2, vpp=2), marks=pytest.mark.slow),
    pytest.param("deepseek_v3", ParallelLayout(tp=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "layout"), SHARED_PREFIXES, ids=lambda part: str(getattr(part, "world_size", part)))
def test_shared_prefixes_give_the_gradients_of_whole_sequences(
    model: str, layout: ParallelLayout, pool: MegatronPool
) -> None:
    """The truth is Hugging Face, one sequence at a time."""
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 96, "shared_prefix": True}
    megatron = {"sequence_parallel": layout.tp > 1}
    config = reference.make_config(pool.models[model], megatron_cfg=megatron, sequence_packing=packing, optimizer=UNCLIPPED)
    batch = group_batch()
    truth = reference.train_reference(pool.models[model], batch, config, reference.sft_reference, steps=1)
    apart = SequencePackingConfig.model_validate({**packing, "shared_prefix": False})
    with pool.group(layout, config) as group:
        found = run_group(group, batch)
        group.call("configure", {"sequence_packing": apart})
        whole = run_group(group, batch)
    assert found["saved"] > 0.1 and whole["saved"] == 0
    inside = np.arange(batch.tokens) < batch["lengths"][:, None]
    for name, expected in (("logprobs", truth.logprobs), ("entropy", truth.entropy)):
        np.testing.assert_allclose(found[name], whole[name], atol=2e-6, rtol=0)
        np.testing.assert_allclose(found[name], expected * inside, atol=1e-5, rtol=0)
    assert found["loss"] == pytest.approx(whole["loss"], abs=1e-6) == pytest.approx(truth.losses[0], abs=2e-6)
    reference.assert_gradients(found["gradients"], whole["gradients"], 5e-6)
    reference.assert_gradients(found["gradients"], truth.gradients, 2e-5)


def group_batch() -> Batch:
    """Three prompts with completions of different lengths, one of them without a token in the loss."""
    prompts, lengths = np.array([12] * 3 + [9] * 3 + [15] * 2), np.array([22, 13, 17, 12, 21, 9, 20, 16])
    places, batch = np.arange(reference.WIDTH), reference.make_batch(grpo=True)
    tokens = np.random.default_rng(5).integers(0, reference.VOCABULARY, batch["tokens"].shape)
    for row in (1, 2, 4, 5, 7):
        tokens[row, : prompts[row]] = tokens[row - 1, : prompts[row]]
    inside = places < lengths[:, None]
    mask = (inside & (places >= prompts[:, None])).astype(np.float32)
    counts = {"global_valid_tokens": float(mask.sum()), "global_valid_sequences": float((mask.sum(1) > 0).sum())}
    return batch.with_fields(tokens=tokens * inside, lengths=lengths, loss_mask=mask).with_scalars(**counts)


def run_group(group: Group, batch: Batch) -> dict[str, Any]:
    """Returns loss, gradients, log-probabilities, entropy, and the share of saved tokens."""
    rows = logprobs(group, batch)
    step = train(group, batch, warmup="whole")  # gradients, but no update
    gradients = reference.assemble(group.call("gradients"))
    metrics = {"loss": step["loss"], "saved": step["shared_prefix_share"], "gradients": gradients}
    return {**metrics, "logprobs": rows["logprobs"], "entropy": rows["entropy"]}
