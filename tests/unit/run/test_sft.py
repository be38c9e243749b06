"""The SFT loop: rates, buckets, epochs, the check of its data position, and warnings of runs that do not learn."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.data import Sampler, open_sampler
from dagrl.data.tokenization import Demonstration, Prompt
from dagrl.errors import CheckpointError, RunError, StopRequestedError
from dagrl.run.checkpoint_store import TrainState
from dagrl.run.loops.sft import evaluate, learning_rate, train_sft
from dagrl.run.plans import train_buckets
from dagrl.run.preflight import Inputs, limit_steps
from dagrl.run.session import UpdateCount
from dagrl.run.stop import StopSignal
from dagrl.runtime.shapes import Bucket


def config(algorithm: str, sft: dict[str, Any], dp: int = 1) -> Config:
    rates = {"optimizer": {"lr": 2e-4}, "scheduler": {"lr_decay_style": "cosine"}}
    sizes = {"train_micro_batch_size": 8, "sequence_buckets": [16, 32], "max_total_sequence_length": 32}
    policy = {"generation": {}, **rates, **sizes, "megatron_cfg": {"data_parallel_size": dp}}
    return Config.model_validate({"name": "t", "algorithm": algorithm, "data": {}, "policy": policy, "sft": sft})


def test_sft_before_grpo_has_its_own_rate() -> None:
    """The workers' schedule is GRPO's, and would be at its end before SFT is; without GRPO it is that of the whole run."""
    own, grpos = {"lr": 3e-3}, {"lr": 2e-4}
    for algorithm, sft, expected in (("grpo", own, own), ("sft", own, own), ("grpo", {}, grpos), ("sft", {}, {})):
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


def limited(demonstrations: int, prompts: int, sft: dict[str, Any], grpo: dict[str, Any]) -> Config:
    grpo = {"num_prompts_per_step": 4, **grpo}
    content = {"policy": {"train_global_batch_size": 8}, "sft": sft, "grpo": grpo, "data": {}}
    config = Config.model_validate({"name": "epochs", "algorithm": "grpo", **content})
    tokens = np.zeros(2, np.int64)
    rows = [Demonstration(tokens, tokens.astype(np.float32), "")] * demonstrations
    asked = [Prompt("", tokens, "", "")] * prompts
    inputs = Inputs(config, {}, None, {}, rows, [], asked, [])  # type: ignore[arg-type]
    return limit_steps(config, inputs)


@pytest.mark.parametrize(("epochs", "steps"), [(None, 20), (1, 4), (2, 7), (9, 20)])
def test_a_run_ends_at_the_first_limit(epochs: int | None, steps: int) -> None:
    limits = {"max_num_steps": 20, "max_num_epochs": epochs}
    config = limited(27, 13, limits, limits)
    assert (config.sft.max_num_steps, config.grpo.max_num_steps) == (steps, steps)  # 27 in eights, 13 in fours


def test_the_steps_of_an_epoch_draw_every_example() -> None:
    config = limited(27, 0, {"max_num_steps": 100, "max_num_epochs": 2}, {})
    sampler = Sampler({"": range(27)}, {"": 1.0}, seed=5)
    drawn = sampler.take(8 * config.sft.max_num_steps)
    assert min(drawn.count(example) for example in range(27)) == 2
    assert config.grpo.max_num_steps == 100  # without prompts nothing limits it


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"grad_norm": float("nan"), "masked_minibatches": 0.0}, "the gradient norm was nan"),
        ({"grad_norm": 0.0}, "the advantages are all zero"),
        ({"masked_minibatches": 2.0}, "the reward returned None or failed for every sample"),
    ],
)
def test_steps_that_change_no_weights_end_the_run(bad: dict[str, float], says: str) -> None:
    """After `limit` of them in a row, and at the end of a run that has no others."""
    good, counted = {"grad_norm": 0.5, "masked_minibatches": 1.0}, UpdateCount()
    for metrics in (bad, bad, good, {"critic/loss": 1.0}, bad, bad):
        counted.count(metrics, 3)
    counted.check_end()
    with pytest.raises(RunError, match=rf"the last 3 steps \(policy.optimizer.max_skipped_steps\) changed no.*{says}"):
        counted.count(bad, 3)
    counted.begin("grpo", 6)
    counted.count(bad, 3)
    with nullcontext() if bad == {"grad_norm": 0.0} else pytest.raises(RunError, match=f"none of its 1 grpo steps.*{says}"):
        counted.check_end()  # rewards may be equal for a while
    alone = UpdateCount(stage="sft")
    alone.check_end()
    alone.count(bad, 3)
    with pytest.raises(RunError, match=f"learned nothing: none of its 1 sft steps.*{says}"):
        alone.check_end()
