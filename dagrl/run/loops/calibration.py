"""Calibrates the scales of an FP8 KV cache (`vllm_cfg.kv_cache_dtype: fp8`). The next refit carries them to generation.

calibrate(config, replays, batch)               # after each training step, on its batch
calibrate_on_prompts(config, replays, prompts)  # before the first refit, when nothing is generated yet
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagrl.config import Config
from dagrl.config.settings import has_fp8_kv_cache, samples_per_step
from dagrl.data.tokenization import Prompt
from dagrl.run.replays import Replays
from dagrl.runtime.shapes import Batch


def calibrate(config: Config, replays: Replays, batch: Batch) -> dict[str, float]:
    """Sets the scales from the keys and values of `batch`, and returns the largest of each as metrics."""
    if not has_fp8_kv_cache(config):
        return {}
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    shards: list[dict[str, float]] = replays.replay("calibrate_kv_scales", rows)
    return {f"kv_scale/{kind}": max(shard[kind] for shard in shards) for kind in shards[0]}


def calibrate_on_prompts(config: Config, replays: Replays, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Calibrates on the first prompts, as many as a step has samples."""
    prompts = prompts[: samples_per_step(config)]
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt.tokens
    return calibrate(config, replays, Batch({"tokens": tokens, "lengths": np.array(list(map(len, prompts)), np.int64)}))
