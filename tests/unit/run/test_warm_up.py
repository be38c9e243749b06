"""Training is warmed up while generation starts; next to it within a share of the GPU, and again if that is too small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.config.settings import samples_per_step
from dagrl.errors import PhaseError, WorkerFailure
from dagrl.machine import DeviceMemory
from dagrl.run.memory_fit import ENGINE_ROOM
from dagrl.run.plans import grpo_plans
from dagrl.run.warm_up import EarlyWarmUp
from tests.unit.run.test_fleet import colocated

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
CACHE, WEIGHTS = 5 * GIB, 4 * GIB
TOO_LARGE = WorkerFailure("train", 0, "dp 0", "here", 1, "train_step", 0, "train_step", "raised", "CUDA out of memory", "")


class TrainGroup:
    """Stands for a train worker on a GPU of 100 GiB. Notes its limits; a warm-up has `exceeded` them or not."""

    def __init__(self, *methods: str, exceeded: bool = False) -> None:
        self.role = SimpleNamespace(name="train", methods=dict.fromkeys(methods))
        self.exceeded, self.limits = exceeded, list[float | None]()

    def call(self, method: str, *args: Any) -> list[Any]:
        if method == "device_memory":
            return [DeviceMemory(50 * GIB, 100 * GIB, {})]
        assert method == "limit_memory"
        self.limits += args
        return [self.exceeded]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> EarlyWarmUp:
    """With a float32 model of 4 GiB, engines of 5 GiB of KV cache, and no phases of its own."""
    monkeypatch.setattr("dagrl.run.warm_up.checkpoint_bytes", lambda policy: WEIGHTS)
    config = colocated("start_together=true")
    config = config.with_keys({"policy.generation.vllm_cfg.kv_cache_memory_bytes": CACHE})
    config = config.with_keys({"loss_fn.reference_policy_kl_penalty": 0.0})
    inputs: Any = SimpleNamespace(tokenizer=None, hf_config={"torch_dtype": "float32"})
    scheduler = MagicMock()
    scheduler.warmup.side_effect = lambda before: {"train_step": 1.0}
    return EarlyWarmUp(config, RunPlan.of(config), inputs, [], {}, scheduler, MagicMock())


def run(early: EarlyWarmUp, group: TrainGroup, check: Callable[[], None] = lambda: None) -> None:
    early([group], check)  # type: ignore[list-item]


def fails_with(early: EarlyWarmUp, error: PhaseError) -> None:
    early.scheduler.warmup.side_effect = error  # type: ignore[attr-defined]


def test_a_tenth_of_the_gpu_stays_free_next_to_what_generation_takes(early: EarlyWarmUp) -> None:
    group = TrainGroup("limit_memory")
    run(early, group)
    generation = (WEIGHTS + CACHE + ENGINE_ROOM) / (100 * GIB)
    assert group.limits == [pytest.approx(0.9 - generation), None]
    assert early.done == {"train_step"}


def test_a_warm_up_that_needs_more_is_left_for_later(early: EarlyWarmUp, caplog: pytest.LogCaptureFixture) -> None:
    fails_with(early, PhaseError((TOO_LARGE,)))
    with caplog.at_level("INFO"):
        run(early, group := TrainGroup("limit_memory", exceeded=True))
    assert not early.done and group.limits[-1] is None and "CUDA out of memory" in caplog.text


@pytest.mark.parametrize(
    ("exceeded", "breaks"), [pytest.param(False, "", id="another error"), pytest.param(True, "it hung", id="a broken graph")]
)
def test_other_failures_end_the_start(early: EarlyWarmUp, exceeded: bool, breaks: str) -> None:
    fails_with(early, PhaseError((TOO_LARGE,), breaks=breaks))
    with pytest.raises(PhaseError):
        run(early, TrainGroup("limit_memory", exceeded=exceeded))


def test_workers_without_a_limit_are_warmed_up_later(early: EarlyWarmUp) -> None:
    run(early, TrainGroup("train_step"))
    assert not early.done
    early.scheduler.warmup.assert_not_called()  # type: ignore[attr-defined]


def test_a_run_that_exchanges_nothing_sets_no_limit(early: EarlyWarmUp) -> None:
    config = early.config.with_keys({"policy.generation.colocated.exchange": "never"})
    early = EarlyWarmUp(config, RunPlan.of(config), early.inputs, [], {}, early.scheduler, early.stop)
    run(early, group := TrainGroup())
    assert early.done == {"train_step"} and not group.limits


def test_scales_are_calibrated_at_the_shapes_of_whole_batches() -> None:
    agent = ["environment.agent=agents:play", "environment.max_conversations=3"]
    cache = "policy.generation.vllm_cfg.kv_cache_dtype=fp8"
    config = load_config(ROOT / "examples" / "grpo_quickstart.yaml", [*agent, cache])
    config = config.with_keys({"policy.train_global_batch_size": samples_per_step(config)})
    plans = {plan.name: plan for plan in grpo_plans(config, RunPlan.of(config))}
    assert plans["calibrate_kv_scales"].buckets == plans["train_step"].buckets
