"""Calibrates the scales of generation's KV cache in FP8 before a refit, if it has one (`vllm_cfg.kv_cache_dtype: fp8`).

calibrate(session, batch)          # after each training step, with what was trained on
calibrate_on_prompts(session)      # before the first refit, when nothing has been generated yet
"""

from __future__ import annotations

import numpy as np

from dagrl.config.settings import has_fp8_kv_cache, samples_per_step
from dagrl.loops.session import Session
from dagrl.shapes import Batch

PHASE = "calibrate_kv_scales"


def calibrate(session: Session, batch: Batch) -> dict[str, float]:
    """Set the scales that the next refit carries to what the batch asks for; metrics: the largest of keys and of values."""
    if not has_fp8_kv_cache(session.config):
        return {}
    rows = Batch({"tokens": batch["tokens"], "lengths": batch["lengths"]})
    shards: list[dict[str, float]] = session.replay(PHASE, rows)
    return {f"kv_scale/{kind}": max(shard[kind] for shard in shards) for kind in shards[0]}


def calibrate_on_prompts(session: Session) -> dict[str, float]:
    """The same with as many prompts as a step has samples."""
    config = session.config
    count = samples_per_step(config)
    prompts = [prompt.tokens for prompt in session.inputs.prompts[:count]]
    tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return calibrate(session, Batch({"tokens": tokens, "lengths": np.array(list(map(len, prompts)), np.int64)}))
