"""Layouts are checked against models before anything starts, slices of weights rebuild what Megatron holds, and FLOPs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from dagrl.bench.models import SHAPES
from dagrl.config import PolicyConfig
from dagrl.errors import ConfigError, LayoutError
from dagrl.refit.slices import expand, volume
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.worker import WorkerContext
from dagrl.telemetry import metrics
from dagrl.telemetry.metrics import StepMetrics, join_optimizer_steps, merge_step_metrics
from dagrl.workers.families.megatron import padded_vocabulary
from dagrl.workers.megatron import check_layout
from dagrl.workers.megatron.architecture import PASSES, read_architecture, sequence_flops, step_tflop, token_flops
from dagrl.workers.megatron.weights import megatron_weight_slices
from dagrl.workers.train.throughput import peak_tflops, throughput_metrics
from tests.families import FAMILIES, random_model
from tests.unit.refit.weight_reference import (
    Config,
    equal,
    filled,
    hf_weights,
    megatron_layouts,
    megatron_tensors,
    model_config,
    model_configs,
)

QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128}
QWEN3 |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ROUTED = {**QWEN3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GLM = {**ROUTED, "model_type": "glm4_moe", "head_dim": 32, "rope_parameters": ROPE}
DEEPSEEK = {**ROUTED, "model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 8}
DEEPSEEK |= {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "topk_method": "noaux_tc"}
MOE = {**QWEN3, "model_type": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
ENDS = {"pp": 2, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 2}


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (QWEN3, ParallelLayout(tp=3), "4 attention heads are not divisible by tp 3"),
        ({**QWEN3, "num_attention_heads": 12, "num_key_value_heads": 3}, ParallelLayout(tp=2), "3 key-value heads and tp 2"),
        ({**QWEN3, "intermediate_size": 130}, ParallelLayout(tp=4), "intermediate_size 130"),
        (QWEN3, ParallelLayout(pp=3), "4 layers are not divisible by pp 3"),
        (QWEN3, ParallelLayout(pp=2, vpp=4), "not divisible by vpp 4"),
        (QWEN3, ParallelLayout(**ENDS), "with pp 2 and vpp Megatron accepts the layer count of one stage only"),
        (QWEN3, ParallelLayout(dp=2, ep=2), "no experts, but ep is 2"),
        (MOE, ParallelLayout(dp=3, ep=3), "4 experts are not divisible by ep 3"),
        (MOE, ParallelLayout(tp=4), "moe_intermediate_size 40 is not divisible by 8 times etp 4"),
        ({**MOE, "moe_intermediate_size": 20}, ParallelLayout(), "moe_intermediate_size 20 is not .* by 8 times etp 1"),
        ({**GLM, "n_shared_experts": 1}, ParallelLayout(tp=16, etp=1), "shared experts' size 24"),
        ({**DEEPSEEK, "q_lora_rank": 10}, ParallelLayout(tp=4), "q_lora_rank 10 is not divisible by tp 4"),
        ({**DEEPSEEK, "kv_lora_rank": 17}, ParallelLayout(tp=2), "kv_lora_rank . qk_rope_head_dim 25 is not .* tp 2"),
        ({**MOE, "hidden_size": 60}, ParallelLayout(), "hidden_size 60 of a model with experts is not divisible by 8"),
    ],
)
def test_a_bad_layout_says_what_to_change(config: dict[str, Any], layout: ParallelLayout, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        check_layout(config, layout)
    assert "choose" in str(caught.value) or "set ep to 1" in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        check_layout(QWEN3, ParallelLayout(tp=3, pp=3))
    assert str(caught.value).count("\n- ") >= 4


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (QWEN3, ParallelLayout(dp=3, tp=2, pp=2, cp=2)),
        (QWEN3, ParallelLayout(tp=4)),
        (QWEN3, ParallelLayout(pp=2, vpp=2)),
        (MOE, ParallelLayout(tp=2, dp=2, ep=4, etp=1)),  # fewer slices of experts than of dense weights
    ],
)
def test_layouts_that_fit(config: dict[str, Any], layout: ParallelLayout) -> None:
    check_layout(config, layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'.*qwen3_moe"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_type is 'proportional'"),
        ({"rope_scaling": {"type": "proportional", "factor": 4.0}}, "rope_type is 'proportional'"),
        ({**GLM, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}, "whole heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor = None; expected a number"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"is_causal": False}, "is_causal is false"),
        ({**MOE, "norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok is 1 .* norm_topk_prob to false"),
        ({**GLM, "n_group": 2, "topk_group": 2}, "n_group is 2, topk_group 2, .* two experts for each"),
        ({**GLM, "norm_topk_prob": False}, "norm_topk_prob is false; .* always normalizes"),
        ({**DEEPSEEK, "norm_topk_prob": False}, "norm_topk_prob is false; .* always normalizes"),
        ({**DEEPSEEK, "n_group": 8, "topk_group": 2}, "n_group is 8, topk_group 2, .* two experts for each"),
        ({**DEEPSEEK, "rope_interleave": False}, "rope_interleave is false"),
        ({**DEEPSEEK, "topk_method": None}, "no topk_method noaux_tc, which vLLM reads; add it"),
        ({**DEEPSEEK, "kv_lora_rank": None}, "kv_lora_rank = None"),
        ({**GLM, "head_dim": None}, "no head_dim, which vLLM reads; add it"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'; expected a whole number"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0; expected a number of at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0; expected a number of at least 1"),
        ({"model_type": "llama", "num_attention_heads": 128}, "head_dim = 0; expected a number of at least 1"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4, not a multiple of num_key_value_heads = 3"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step = 0; expected a number of at least 1"),
    ],
)
def test_models_that_are_not_supported(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_architecture({**QWEN3, **change})


MIXTRAL = {**QWEN3, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"sliding_window": 16}, {"full_tokens": None, "windows": (None,) * 4}),  # Qwen has one without using it
        ({"model_type": "llama", "sliding_window": 16}, {"full_tokens": 16, "windows": (None,) * 4}),  # which vLLM uses
        ({"model_type": "mistral"}, {"full_tokens": None, "windows": (4096,) * 4}),
        ({"model_type": "mistral", "sliding_window": None}, {"windows": (None,) * 4}),
        ({**SLIDING, "max_window_layers": 3}, {"windows": (None, None, None, 16)}),
        ({**SLIDING, "max_window_layers": None}, {"windows": (None,) * 4}),
        ({**SLIDING, "layer_types": ["sliding_attention"] * 4}, {"windows": (16,) * 4}),
        ({**MOE, **SLIDING}, {"windows": (16,) * 4}),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 18}, {"full_tokens": 18}),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 24}, {"full_tokens": 24}),
        ({**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, {"moe_layers": (False, True, False, False)}),
        (MIXTRAL, {"experts": 8, "experts_per_token": 2, "expert_ffn": 128, "moe_layers": (True,) * 4}),
        (MIXTRAL, {"normalize_expert_weights": True, "norm_eps": 1e-5}),
        ({}, {"constant_row": None}),  # a padding token that ends no text is constant
        ({"pad_token_id": 0}, {"constant_row": 0}),
        ({"pad_token_id": 7, "eos_token_id": [3, 5]}, {"constant_row": 7}),
        *(({"pad_token_id": 3, "eos_token_id": ends}, {"constant_row": None}) for ends in (3, [5, 3])),
        ({"pad_token_id": -1}, {"constant_row": None}),
    ],
)
def test_keys_are_read_as_transformers_does(change: dict[str, Any], keys: dict[str, Any]) -> None:
    model = read_architecture({**QWEN3, **change})
    assert {key: getattr(model, key) for key in keys} == keys


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_scaled_rope_is_read_as_transformers_does(key: str) -> None:
    """Configurations before 2024 have `type` instead of `rope_type`. Ignoring it would give an unscaled rope."""
    model = {**QWEN3, "rope_theta": 5000.0, key: {"type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
    rope = transformers.AutoConfig.for_model(**model).rope_parameters
    assert rope["rope_type"] == "linear"
    assert read_architecture(model).rope == rope


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_missing_sizes_and_rope_are_those_of_transformers(kind: str, key: str) -> None:
    model = {**MOE, "model_type": kind, "num_attention_heads": 64, "hidden_size": 512}
    model.pop(key, None)
    theirs, mine = transformers.AutoConfig.for_model(**model), read_architecture(model)
    assert mine.kv_heads == theirs.num_key_value_heads
    assert mine.head_dim == (getattr(theirs, "head_dim", None) or 512 // 64)
    assert mine.rope["rope_theta"] == theirs.rope_parameters["rope_theta"]


def test_glm_is_read_as_transformers_does() -> None:
    theirs, mine = transformers.AutoConfig.for_model(**GLM), read_architecture(GLM)
    assert mine.moe_layers == (False, True, True, True) and theirs.first_k_dense_replace == 1
    assert mine.rope == theirs.rope_parameters and mine.rotary_dim == 16
    assert (mine.shared_ffn, mine.expert_scale) == (24 * theirs.n_shared_experts, theirs.routed_scaling_factor)
    assert (mine.norm_eps, mine.qk_norm, mine.qkv_bias) == (1e-5, theirs.use_qk_norm, theirs.attention_bias)
    assert mine.expert_bias and mine.normalize_expert_weights == theirs.norm_topk_prob
    given = read_architecture({**GLM, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}})
    assert given.rotary_dim == 8 and read_architecture({**GLM, "use_qk_norm": True, "attention_bias": True}).qkv_bias


@pytest.mark.parametrize(("vocabulary", "tp", "rows"), [(200, 1, 256), (256, 1, 256), (200, 4, 512), (151936, 4, 152064)])
def test_padded_vocabulary(vocabulary: int, tp: int, rows: int) -> None:
    assert padded_vocabulary(vocabulary, tp) == rows


OPTIONAL = "num_key_value_heads", "head_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace"
"""Keys whose defaults differ between families."""


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_slices_rebuild_what_megatron_holds(data: st.DataObject) -> None:
    config = data.draw(model_configs())
    layout = data.draw(megatron_layouts(config, limit=16))
    weights = hf_weights(config)
    for rank in range(layout.world_size):
        expected = megatron_tensors(weights, config, layout, rank)
        slices = megatron_weight_slices(config, layout, rank)
        assert equal(filled(weights, slices, expected), expected)  # padding rows, which no slice names, are 0 in both


def test_a_rank_with_only_padding_has_no_embedding() -> None:
    config = model_config(vocab_size=100)
    names = [{held.name for held in megatron_weight_slices(config, ParallelLayout(tp=2), rank)} for rank in range(2)]
    assert "model.embed_tokens.weight" in names[0] and "model.embed_tokens.weight" not in names[1]


@pytest.mark.parametrize(
    ("changes", "layout", "words"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, ParallelLayout(tp=2), r"k_proj\.weight: 3 key-value heads"),
        ({"num_attention_heads": 6}, ParallelLayout(tp=4), r"q_proj\.weight: the attention heads \(6\)"),
        ({}, ParallelLayout(pp=3), "layers"),
        ({"intermediate_size": 18}, ParallelLayout(tp=4), r"gate_proj\.weight: .*intermediate_size"),
        ({"model_type": "qwen3_moe", **model_config("qwen3_moe")}, ParallelLayout(dp=3, ep=3), r"gate_proj.*: the experts"),
        ({"num_key_value_heads": 1, "head_dim": 3}, ParallelLayout(tp=4), r"q_proj\.weight: the rows of query, key and"),
    ],
)
def test_a_bad_layout_names_rank_parameter_and_cause(changes: dict[str, object], layout: ParallelLayout, words: str) -> None:
    with pytest.raises(LayoutError, match=rf"^train rank 0 \(dp 0, pp 0, .*{words}"):
        megatron_weight_slices(model_config(**changes), layout, 0)  # type: ignore[arg-type]


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="mamba"):
        megatron_weight_slices(model_config("mamba"), ParallelLayout(), 0)


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, config in FAMILIES.items() for key in OPTIONAL if key in config]
)
def test_missing_keys_are_as_in_transformers(kind: str, key: str, tmp_path: Path) -> None:
    """The parameters of a checkpoint written by transformers, and their elements."""
    model = {**FAMILIES[kind], "num_attention_heads": 32, "num_key_value_heads": 2}
    config = {name: value for name, value in model.items() if name != key}
    _, written = random_model(config, tmp_path)
    sizes = {name: tensor.numel() for name, tensor in written.items()}
    held: Counter[str] = Counter()
    for piece in expand(megatron_weight_slices(config, ParallelLayout(), 0)):
        held[piece.name] += volume(piece.box)
    assert held == sizes


REAL_CASES: list[tuple[Config, ParallelLayout]] = [
    (model_config("qwen3", tie_word_embeddings=True), ParallelLayout(tp=2, pp=2)),
    (model_config("qwen3"), ParallelLayout(tp=4, dp=2)),  # fewer key-value heads than ranks
    (model_config("qwen2", tie_word_embeddings=True), ParallelLayout(tp=2)),
    (model_config("llama"), ParallelLayout(pp=2, vpp=2)),
    (model_config("llama", num_hidden_layers=6), ParallelLayout(pp=3, cp=2, first_stage_layers=1, last_stage_layers=3)),
    (model_config("llama", num_hidden_layers=8), ParallelLayout(pp=2, vpp=2, first_stage_layers=2)),
    (model_config("qwen3_moe", tie_word_embeddings=True), ParallelLayout(tp=2, dp=2, ep=2, etp=1)),
    (model_config("qwen3_moe"), ParallelLayout(tp=2, dp=2, ep=2)),
    (model_config("mixtral"), ParallelLayout(tp=2, dp=2, ep=4, etp=1)),
    (model_config("glm4_moe"), ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
    (model_config("deepseek_v3"), ParallelLayout(tp=2, pp=2, ep=2, etp=1, first_stage_layers=1)),
    (model_config("qwen3_moe"), ParallelLayout(tp=2, dp=4, ep=2)),  # experts cut twice, with replicas
    (model_config("deepseek_v3"), ParallelLayout(dp=4, ep=2, etp=2)),  # experts cut where attention is not
    (model_config("deepseek_v3"), ParallelLayout(tp=2, pp=2, vpp=2, cp=2, ep=2, etp=1)),
    (model_config("deepseek_v3", q_lora_rank=None, n_shared_experts=None), ParallelLayout(tp=2)),
]


# Model FLOPs against torch's count of a Hugging Face model's forward pass, and the metrics derived from them.


ODD = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 16}
LATENT = {"model_type": "deepseek_v3", "num_key_value_heads": 6, "head_dim": 8}
LENGTH = 20


@pytest.mark.parametrize(
    "keys",
    [*({"model_type": kind} for kind in ("qwen3", "qwen3_moe", "glm4_moe")), LATENT, {**LATENT, "q_lora_rank": None}],
    ids=["grouped-queries", "experts", "shared-experts", "latent", "latent, queries whole"],
)
def test_forward_flops_are_those_that_torch_counts(keys: dict[str, Any]) -> None:
    settings = {**FAMILIES[keys["model_type"]], **ODD, **keys}
    config = AutoConfig.for_model(**settings, experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 300, (1, LENGTH)))
    architecture = read_architecture({**settings, "rms_norm_eps": 1e-6})
    attention = sequence_flops(architecture, LENGTH) - LENGTH * token_flops(architecture)
    counted = float(counter.get_total_flops())
    routers = 2 * LENGTH * settings["hidden_size"] * architecture.experts * sum(architecture.moe_layers)
    whole_square = LENGTH * token_flops(architecture) + 2 * attention  # torch counts what a causal mask hides
    assert counted - routers == pytest.approx(whole_square, rel=1e-9)  # Megatron's formula leaves routers out
    step = step_tflop(architecture, [LENGTH, LENGTH, 0])
    assert step * 1e12 == pytest.approx(PASSES * 2 * sequence_flops(architecture, LENGTH))


def test_a_known_model_costs_what_its_parameters_say() -> None:
    """Six FLOPs per parameter and token, for Qwen3-4B's 4.02 billion (with tied embeddings)."""
    architecture = read_architecture(SHAPES["qwen3-4b"].config)
    assert PASSES * token_flops(architecture) == pytest.approx(6 * 4.02e9, rel=0.002)


MEASURED = read_architecture(FAMILIES["qwen3"])


def step_of(layout: ParallelLayout, seconds: list[float], lengths: list[list[int]]) -> StepMetrics:
    """Returns the reports of all workers of a layout; `lengths` are those of each shard's rows."""
    parts, cpu = [], torch.device("cpu")
    for rank in range(layout.world_size):
        context, rows = WorkerContext("train", rank, layout, 0, 1.0), lengths[layout.coordinates(rank).dp]
        work = {"tflop": step_tflop(MEASURED, rows), "tokens": sum(rows), "seconds": seconds[rank]}
        parts.append(throughput_metrics(PolicyConfig(), context, cpu, **work))  # type: ignore[arg-type]
    return merge_step_metrics(parts)


def test_metrics_of_a_step_over_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shards of two workers with different rows and one slow worker."""
    monkeypatch.setattr("dagrl.workers.train.throughput.peak_tflops", lambda *device: 1e-3)
    layout, lengths = ParallelLayout(dp=2, tp=2), [[10, 30], [20]]
    seconds = [0.25, 0.25, 0.25, 0.5]
    found = step_of(layout, seconds, lengths).flat()
    tflop = [step_tflop(MEASURED, rows) for rows in lengths]
    assert found[metrics.TRAIN_SECONDS] == 0.5
    assert found[metrics.TRAIN_TOKENS_PER_SEC_PER_GPU] == pytest.approx(60 / 0.5 / 4)
    assert found[metrics.TRAIN_TFLOPS_PER_GPU] == pytest.approx(sum(tflop) / 0.5 / 4)
    assert found[metrics.TRAIN_MFU] == pytest.approx(found[metrics.TRAIN_TFLOPS_PER_GPU] / 1e-3)
    for rank in range(4):
        assert found[f"perf/rank_{rank}/train_seconds"] == seconds[rank]
    assert {name for name in found if not name.startswith("perf/")} == set()


def test_without_a_known_peak_there_is_no_mfu() -> None:
    found = step_of(ParallelLayout(dp=2), [0.25, 0.5], [[10], [20]]).flat()
    assert found[metrics.TRAIN_TFLOPS_PER_GPU] > 0 and metrics.TRAIN_MFU not in found


def test_rates_cover_all_optimizer_steps() -> None:
    parts = [step_of(ParallelLayout(dp=2), [1.0, 2.0], rows) for rows in ([[10], [20]], [[30], [40]])]
    parts = [
        replace(part, sums={**part.sums, metrics.VALID_TOKENS: weight})
        for part, weight in zip(parts, (1.0, 9.0), strict=True)
    ]
    found = join_optimizer_steps(parts).flat()
    assert found["perf/rank_0/train_seconds"] == 2.0 and found["perf/rank_1/train_seconds"] == 4.0
    assert found[metrics.TRAIN_TOKENS_PER_SEC_PER_GPU] == pytest.approx(100 / 4 / 2)


PEAKS = {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H20": 148.0, "NVIDIA A100-SXM4-80GB": 312.0, "": None}


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [*((name, "bfloat16", peak) for name, peak in PEAKS.items()), ("NVIDIA H200", "float32", None)],
)
def test_peaks_by_device_name(device: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(device, precision) == peak
