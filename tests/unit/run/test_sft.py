"""The SFT loop: its learning rate, its buckets, and the check of its data position."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.data import open_sampler
from dagrl.data.tokenization import Demonstration
from dagrl.errors import CheckpointError, StopRequestedError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.loops.sft import evaluate, learning_rate, train_sft
from dagrl.run.plans import train_buckets
from dagrl.run.stop import StopSignal
from dagrl.runtime.shapes import Bucket


def config(algorithm: str, sft: dict[str, Any], dp: int = 1) -> Config:
    policy = {
        "train_micro_batch_size": 8,
        "generation": {},
        "sequence_buckets": [16, 32],
        "max_total_sequence_length": 32,
        "optimizer": {"lr": 2e-4},
        "scheduler": {"lr_decay_style": "cosine"},
        "megatron_cfg": {"data_parallel_size": dp},
    }
    return Config.model_validate({"name": "t", "algorithm": algorithm, "data": {}, "policy": policy, "sft": sft})


@pytest.mark.parametrize(
    ("algorithm", "sft", "expected"),
    [
        ("grpo", {"lr": 3e-3}, {"lr": 3e-3}),
        ("sft", {"lr": 3e-3}, {"lr": 3e-3}),
        ("grpo", {}, {"lr": 2e-4}),  # the workers' schedule is GRPO's, and would be at its end before SFT is
        ("sft", {}, {}),  # the schedule of the whole run
    ],
)
def test_sft_before_grpo_has_its_own_rate(algorithm: str, sft: dict[str, Any], expected: dict[str, float]) -> None:
    run = config(algorithm, sft)
    assert learning_rate(run, RunPlan.of(run)) == expected


@pytest.mark.parametrize(("rows", "dp", "per_shard"), [(64, 16, 4), (64, 4, 16), (10, 1, 10), (33, 2, 17)])
def test_buckets_have_no_more_rows_than_needed(rows: int, dp: int, per_shard: int) -> None:
    """They may have fewer rows than a microbatch holds."""
    assert train_buckets(config("sft", {}, dp), rows) == (Bucket(per_shard, 16), Bucket(per_shard, 32))


@pytest.mark.parametrize("may_stop", [False, True])
def test_a_stop_ends_a_validation(may_stop: bool) -> None:
    """After a step it returns nothing, so that the step is recorded; before the first step it ends the run."""
    rows = [Demonstration(np.array([1, 2]), np.ones(2, np.float32), "")] * 99
    stop = StopSignal()
    session: Any = MagicMock(config=config("sft", {}), stop=stop)
    stop.requested = True
    with pytest.raises(StopRequestedError) if may_stop else nullcontext():
        assert evaluate(session, rows, may_stop=may_stop) == {}
    assert not session.replays.mock_calls


def test_a_position_in_other_demonstrations_is_an_error() -> None:
    """The number is equal; one token differs."""

    def rows(last: int) -> list[Demonstration]:
        mask = np.ones(3, np.float32)
        return [Demonstration(np.array([1, 2, token]), mask, "") for token in (3, 4, last)]

    position = open_sampler(rows(5), config("sft", {}).data).state()
    inputs = SimpleNamespace(demonstrations=rows(6), validation_demonstrations=[])
    checkpoints = SimpleNamespace(state=TrainState(2, {"sft_sampler": position}))
    run = config("sft", {})
    session: Any = SimpleNamespace(config=run, plan=RunPlan.of(run), inputs=inputs, checkpoints=checkpoints)
    with pytest.raises(CheckpointError, match="references or order of the examples differ"):
        train_sft(session)
