"""Training on a batch in several minibatches: metrics of the whole, and minibatches without loss are skipped."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dagrl.config import Config
from dagrl.rl.losses import Denominators
from dagrl.run.loops.policy_update import PolicyTrainer, collect_steps, split_minibatches
from dagrl.runtime.shapes import Batch
from dagrl.telemetry.metrics import StepMetrics, join_optimizer_steps, merge_step_metrics
from tests.unit.rl.losses_by_kind import LOSSES

CONFIG = Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": {"train_global_batch_size": 4}})


def make_batch(rows: int, masked_rows: slice = slice(0)) -> Batch:
    """Returns rows with 1 to 9 tokens in the loss, so that minibatches have different weights."""
    generator = np.random.default_rng(5)
    lengths = generator.integers(2, 11, rows)
    mask = (np.arange(10)[None] < lengths[:, None]).astype(np.float32)
    mask[:, 0] = mask[masked_rows] = 0
    names = ("generation_logprobs", "prev_logprobs", "reference_logprobs", "advantages")
    fields = {name: generator.normal(-1, 0.5, (rows, 10)).astype(np.float32) for name in names}
    return Batch({"tokens": np.zeros((rows, 10), np.int64), "lengths": lengths, "loss_mask": mask, **fields})


def take_step(batch: Batch) -> StepMetrics:
    """Returns the metrics of the real loss under a fixed policy; each step takes a second."""
    data = {name: torch.from_numpy(values) for name, values in batch.fields.items()}
    tokens, rows = float(batch["loss_mask"].sum()), float((batch["loss_mask"].sum(1) > 0).sum())
    logprobs = data["prev_logprobs"] + 0.3 * data["advantages"]
    output = LOSSES["policy"](logprobs, data, CONFIG.loss_fn, Denominators(tokens, rows))
    sums = {name: float(value) for name, value in output.sums.items()}
    maxima = {name: float(value) for name, value in output.maxima.items()} | {"perf/train_seconds": 1.0}
    figures = {"train_tokens": float(batch["lengths"].sum()), "train_tflop": 2.0, "train_ranks": 4.0}
    return merge_step_metrics([StepMetrics(sums | figures, maxima, {"grad_norm": tokens, "lr": tokens})])


def optimized(batch: Batch) -> tuple[dict[str, float], int]:
    calls: list[Batch] = []

    def submit(phase: str, minibatch: Batch, rows: object) -> Batch:
        assert phase == "train_step"
        calls.append(minibatch)
        return minibatch

    replays: Any = SimpleNamespace(submit=submit, collect=lambda phase, minibatch: ([take_step(minibatch)], None))
    parts: Any = dict.fromkeys(("plan", "train", "stop", "log", "thread"))
    trainer = PolicyTrainer(CONFIG, replays=replays, media=False, **parts)
    steps = trainer.submit_steps(batch, 1, split_minibatches(CONFIG, batch))
    return collect_steps(replays, steps, 1), len(calls)


def test_metrics_are_those_of_the_whole_batch() -> None:
    batch = make_batch(12)
    actual, steps = optimized(batch)
    whole = take_step(batch).flat()
    tokens = [float(batch["loss_mask"][start : start + 4].sum()) for start in (0, 4, 8)]
    assert steps == 3 and len(set(tokens)) == 3
    figures = {name for name in whole if name.startswith("perf/")}
    for name in whole.keys() - figures - {"grad_norm", "lr"}:
        assert actual[name] == pytest.approx(whole[name], rel=1e-5), name
    assert (actual["grad_norm"], actual["lr"]) == (max(tokens), tokens[-1])
    assert actual["perf/train_seconds"] == 3.0
    assert actual["perf/policy_training_tokens_per_sec"] == pytest.approx(float(batch["lengths"].sum()) / 3)
    assert actual["perf/train_tflops_per_gpu"] == pytest.approx(3 * 2.0 / 3 / 4)


def test_nan_is_the_largest() -> None:
    """Over the minibatches of a step and over workers, in any order."""
    parts = [StepMetrics({"valid_tokens": 1.0}, {"max": value}, {"grad_norm": value}) for value in (0.7, math.nan, 0.2)]
    for order in (parts, parts[::-1]):
        joined = join_optimizer_steps(order)
        assert math.isnan(joined.shared["grad_norm"]) and math.isnan(merge_step_metrics(order).maxima["max"])


def test_minibatches_without_loss_are_skipped_and_counted() -> None:
    actual, steps = optimized(make_batch(12, slice(4, 8)))
    assert (steps, actual["masked_minibatches"]) == (2, 1)
    assert np.isfinite(list(actual.values())).all()
    assert optimized(make_batch(8, slice(0, 8))) == ({"masked_minibatches": 2.0}, 0)
