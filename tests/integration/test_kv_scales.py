"""FP8 KV-cache scales: calibrated by the Megatron worker against transformers' cache, and used by vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config import Config
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.shapes import Batch
from tests.integration import megatron_reference as reference, vllm_calls
from tests.integration.megatron_pool import MegatronPool
from tests.integration.vllm_models import chosen, hf_logprobs, make_checkpoint, make_config
from tests.integration.vllm_ranks import Engine, Ranks, requests

LAYOUTS = [ParallelLayout(tp=2, pp=2), ParallelLayout(dp=2, cp=2)]


def with_fp8_cache(config: Config, precision: str) -> Config:
    content = config.model_dump()
    content["policy"]["generation"] = content["policy"]["generation"] or {}
    engine = content["policy"]["generation"].setdefault("vllm_cfg", {})
    content["policy"]["generation"]["vllm_cfg"] = {**engine, "kv_cache_dtype": "fp8", "precision": precision}
    return Config.model_validate(content)


def largest_in_cache(model: Path, batch: Batch) -> list[tuple[float, float]]:
    """Returns the largest key and value of each layer in transformers' cache for the batch."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found: list[list[tuple[float, float]]] = []
    for tokens, length in zip(batch["tokens"], batch["lengths"], strict=True):
        own = np.resize(tokens[:length], batch.tokens)  # calibration fills rows with their own tokens
        with torch.no_grad():
            cache = loaded(torch.tensor(own)[None], use_cache=True).past_key_values
        found.append([(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers])
    return [(max(k for k, _ in layer), max(v for _, v in layer)) for layer in zip(*found, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.describe())
def test_scales_are_the_largest_of_the_batch_over_448(
    layout: ParallelLayout, megatron_pool: MegatronPool, tiny_models: dict[str, Path]
) -> None:
    model, batch = tiny_models["qwen3"], reference.make_batch()
    expected = [(k / 448, v / 448) for k, v in largest_in_cache(model, batch)]
    config = with_fp8_cache(reference.make_config(model), "bfloat16")
    with megatron_pool.group(layout, config) as group:
        rows = np.array_split(np.arange(batch.rows), layout.dp)
        shards = [(batch.select(rows[layout.coordinates(rank).dp]),) for rank in range(layout.world_size)]
        assert set(group.call("kv_scales")[0].values()) == {1.0}
        group.call("calibrate_kv_scales", per_rank=shards, warmup=True)
        assert set(group.call("kv_scales")[0].values()) == {1.0}  # a warm-up leaves nothing
        told = group.call("calibrate_kv_scales", per_rank=shards)
        held = {name: scale for part in group.call("kv_scales") for name, scale in part.items()}
    assert len(held) == 2 * len(expected)
    for layer, scales in enumerate(expected):
        for kind, scale in zip("kv", scales, strict=True):
            assert math.isclose(held[f"model.layers.{layer}.self_attn.{kind}_scale"], scale, rel_tol=1e-5)
    assert math.isclose(max(part["k"] for part in told), max(k for k, _ in expected), rel_tol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def engine(vllm_ranks: Ranks, model: Path) -> Iterator[Engine]:
    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's FP8 KV cache needs AVX-512 or AMX on a CPU")
    with vllm_ranks.engine(with_fp8_cache(make_config(model), "bfloat16"), 1) as engine:
        yield engine


def error_of_logprobs(engine: Engine, model: Path, scales: dict[str, float], version: int) -> float:
    """Returns the mean difference from transformers after an update with these scales."""
    engine.on_all(vllm_calls.write_weights, model, version, scales)
    prompt: list[int] = list(range(5, 25))
    [row] = engine.run(requests([1], [prompt], new=20, seed=version))
    expected = chosen(hf_logprobs(model, prompt, row.tokens), row.tokens)
    return float((torch.tensor(row.logprobs).double() - expected).abs().mean())


@pytest.mark.slow
def test_vllm_divides_by_the_received_scales(engine: Engine, model: Path) -> None:
    prompt = Batch({"tokens": np.arange(5, 25)[None], "lengths": np.array([20])})
    names = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    right: dict[str, Any] = {}
    for name, (k, v) in zip(names, largest_in_cache(model, prompt), strict=True):
        right |= {f"{name}.k_scale": k / 448, f"{name}.v_scale": v / 448}
    good = error_of_logprobs(engine, model, right, 1)
    [held] = engine.on_all(vllm_calls.kv_scales)
    assert held == {
        f"{name}.attn": tuple(np.float32(right[f"{name}.{kind}_scale"]).item() for kind in "kv" for _ in range(3))
        for name in names
    }
    too_large = {name: scale * 1e5 for name, scale in right.items()}  # all keys and values round to zero
    bad = error_of_logprobs(engine, model, too_large, 2)
    assert good < 0.1 and bad > 3 * good, (good, bad)
    assert error_of_logprobs(engine, model, right, 3) < 0.1
