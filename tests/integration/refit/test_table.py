"""The mappings of NeMo-RL's pull request 2413: planned at full size, and run at reduced width with the same structure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dagrl.errors import RefitPlanError
from dagrl.refit import TIED_HEAD, RefitPlan, plan_refit
from dagrl.refit.plan.planner import BUCKET_BYTES
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.megatron.weights import megatron_weight_slices
from tests.refit_mappings import DEEPSEEK_V3, LARGEST, QWEN3_4B, QWEN3_30B, QWEN3_235B, TABLE, RefitMapping
from tests.unit.refit.memory_channel import run_refit
from tests.unit.refit.weight_reference import (
    VllmRank,
    equal,
    hf_shapes,
    hf_weights,
    megatron_tensors,
    vllm_tensors,
    vllm_weight_slices,
    zeros_like,
)

SMALL: dict[str, dict[str, int]] = {
    "qwen3": {"hidden_size": 16, "num_attention_heads": 8, "head_dim": 4, "intermediate_size": 16, "vocab_size": 200},
    "deepseek_v3": {"hidden_size": 8, "num_attention_heads": 32, "q_lora_rank": 4, "kv_lora_rank": 6, "vocab_size": 2100},
}
SMALL["qwen3_moe"] = {**SMALL["qwen3"], "num_attention_heads": 16, "moe_intermediate_size": 8}
SMALL["deepseek_v3"] |= {"qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "intermediate_size": 32}
SMALL["deepseek_v3"] |= {"moe_intermediate_size": 32}


def plan_of(row: RefitMapping, model: dict[str, Any], dtype: str = "bfloat16", **options: Any) -> RefitPlan:
    sources = [megatron_weight_slices(model, row.train, rank) for rank in range(row.train.world_size)]
    wanted = [vllm_weight_slices(model, VllmRank(row.tp, rank, fp8=row.fp8)) for rank in range(row.tp)] * row.dp
    return plan_refit(sources, wanted, dtype=dtype, **options)


def hosts_of(row: RefitMapping) -> list[int]:
    """The host of each rank: 8 GPUs per host, no host shared by both sides."""
    train, generation = row.train.world_size, row.tp * row.dp
    return [rank // 8 for rank in range(train)] + [-(-train // 8) + rank // 8 for rank in range(generation)]


FULL_IN_CI = {
    "4b-dp2pp2tp2-to-tp4dp2",
    "30b-dp2pp2tp2ep4etp1-to-tp8dp2",
    "4b-dp4tp2-to-tp4dp2-fp8",
}
"""One of each kind of model; a test below plans the largest, and all run at reduced width."""


def marked(rows: list[RefitMapping], slow: Callable[[RefitMapping], bool]) -> list[Any]:
    return [pytest.param(row, marks=[pytest.mark.slow] * slow(row)) for row in rows]


@pytest.mark.parametrize("row", marked(TABLE[:-2], lambda row: str(row) not in FULL_IN_CI), ids=str)
def test_planned_at_full_size(row: RefitMapping) -> None:
    """Every generation rank receives what it holds; a replica receives the model plus what its ranks repeat.

    Across hosts of 8, in little more time than the busiest rank needs for its messages alone.
    """
    summary = plan_of(row, row.model, hosts=hosts_of(row)).summary()
    received = summary.received
    held = [0] * row.tp
    for rank in range(row.tp):
        for one in vllm_weight_slices(row.model, VllmRank(row.tp, rank, fp8=row.fp8)):
            size = {"float32": 4, "float8_e4m3fn": 1}.get(one.dtype, 2)
            held[rank] += size * _volume(one.box) + (4 * _volume(one.scales.local) if one.scales else 0)
    for index, count in enumerate(received):
        assert held[index % row.tp] <= count < 1.001 * held[index % row.tp] + 1000
    if row.tp == 1 and not row.fp8:
        assert abs(received[0] / (2 * parameters(row.model)) - 1) < 1e-4
    assert max(summary.sent) <= 1.2 * sum(summary.sent) / len(summary.sent)  # 1.18: FP8 does not quantize the embedding
    assert summary.floor_s <= summary.busiest_s
    assert 0.999 <= summary.schedule_s / summary.busiest_s <= 1.25
    assert summary.staging_bytes <= 2 * BUCKET_BYTES[1]


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    return int(torch.Size([stop - start for start, stop in box]).numel())


def parameters(model: dict[str, Any]) -> int:
    """Counts the parameters of the whole model that ranks are cut from."""
    return sum(torch.Size(shape).numel() for _, shape in hf_shapes(model))


def test_parameter_counts_are_the_published_ones() -> None:
    """Parameter counts of the model cards; DeepSeek-V3 without its prediction layer."""
    published = {4_022_468_096: QWEN3_4B, 30_532_122_624: QWEN3_30B, 235_093_634_560: QWEN3_235B}
    for count, model in published.items():
        assert parameters(model) == count
    assert abs(parameters(DEEPSEEK_V3) / 671_026_419_200 - 1) < 1e-5


def reduced(row: RefitMapping) -> dict[str, Any]:
    """The same structure with narrow layers: as many heads, experts and layers as the layouts need."""
    model = {**row.model, **SMALL[row.model["model_type"]]}
    model["num_hidden_layers"] = 2 * row.train.pp
    train = row.train
    if (train.first_stage_layers, train.last_stage_layers) != (None, None):
        model["num_hidden_layers"] = train.pp + (train.first_stage_layers or 1) + (train.last_stage_layers or 1) - 2
    if "n_routed_experts" in model:
        model["n_routed_experts"] = 2 * train.ep
    if "num_experts" in model:
        model["num_experts"] = 2 * train.ep
    if model["model_type"] == "deepseek_v3":
        model["num_key_value_heads"] = model["num_attention_heads"]
    return model


@pytest.mark.parametrize("row", marked([row for row in TABLE if not row.fp8], LARGEST.__contains__), ids=str)
def test_run_at_reduced_width(row: RefitMapping) -> None:
    """Equals slices of the whole model bit for bit. The largest run with one replica, which has ranks of every kind."""
    model = reduced(row)
    model.setdefault("tie_word_embeddings", False)
    replicas = row.dp if row not in LARGEST else 1
    one = RefitMapping(model, row.train, row.tp, replicas)
    plan = plan_of(one, model, "float32", bucket_bytes=20_000)
    weights = hf_weights(model)
    sources = [megatron_tensors(weights, model, row.train, rank) for rank in range(row.train.world_size)]
    expected = [vllm_tensors(weights, model, row.tp, rank) for rank in range(row.tp)] * replicas
    built = [zeros_like(tensors) for tensors in expected]
    run_refit(plan, [*sources, *built])
    assert all(equal(ours, theirs) for ours, theirs in zip(built, expected, strict=True))


@pytest.mark.parametrize(
    ("model", "train", "tp", "message"),
    [
        (QWEN3_30B, ParallelLayout(tp=4), 2, r"gate_proj.weight': a shard from 0 to 192 ends inside an FP8 block"),
        ({**QWEN3_4B, "head_dim": 64}, ParallelLayout(), 1, "a shard from 0 to 64|ends inside an FP8 block"),
    ],
)
def test_shards_that_split_a_block_are_rejected(model: dict[str, Any], train: ParallelLayout, tp: int, message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        plan_of(RefitMapping(model, train, tp, 1, fp8=True), {**model, "num_hidden_layers": 4}, aliases=TIED_HEAD)


PROGRAM = """
import json, resource, sys
from tests.refit_mappings import LARGEST
from tests.integration.refit.test_table import hosts_of, plan_of
(row,) = (row for row in LARGEST if str(row) == sys.argv[1])
size = row.train.world_size + row.tp * row.dp
plan = plan_of(row, row.model, hosts=hosts_of(row))
text = str(plan.summary())
plan.for_rank(0), plan.for_rank(size - 1)
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([used / 2**20, plan.summary().received[0], text.splitlines()[0], plan.summary().staging_bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", LARGEST, ids=str)
def test_the_largest_models_are_planned_in_little_memory(row: RefitMapping) -> None:
    """With description, hosts, summary and the parts of two ranks, in its own process."""
    command = [sys.executable, "-c", PROGRAM, str(row)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    gib, received, title, staging = json.loads(done.stdout)
    assert gib < 4 and staging <= 2 * BUCKET_BYTES[1]
    assert f"from {row.train.world_size} to {row.tp * row.dp} ranks" in title
    share = 2 * parameters(row.model) / row.tp
    assert share < received < 1.2 * share  # norms, routers and few key-value heads are repeated
