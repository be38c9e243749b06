"""Log-probabilities stay with their shard: it trains on the rows that it computed, and the driver never carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, strategies as st

from dagrl.config import Config
from dagrl.config.plan import RunPlan
from dagrl.run.loops.policy_update import PolicyTrainer, split_minibatches
from dagrl.run.plans import column_phases, load_phase
from dagrl.runtime.phase import Phase
from dagrl.runtime.shapes import Batch

WIDTH = 64


def configuration(size: int, shards: int) -> Config:
    policy = {"train_global_batch_size": size, "megatron_cfg": {"data_parallel_size": shards}, "generation": {}}
    return Config.model_validate({"name": "t", "algorithm": "grpo", "data": {}, "policy": policy})


def make_batch(lengths: Sequence[int]) -> Batch:
    rows = len(lengths)
    fields: dict[str, npt.NDArray[Any]] = {
        "tokens": np.zeros((rows, WIDTH), np.int64),
        "lengths": np.array(lengths, np.int64),
        "row_ids": 100 + np.arange(rows),
    }
    names = ("loss_mask", "advantages", "generation_logprobs")
    return Batch({**fields, **{name: np.ones((rows, WIDTH), np.float32) for name in names}})


class Recorded:
    """In place of `Replays`: what each phase was given, and the row ids of each shard."""

    shared = None

    def __init__(self, phases: Mapping[str, Phase]) -> None:
        self.phases = phases
        self.batches: list[tuple[str, Batch]] = []
        self.ids: list[tuple[str, list[set[int]]]] = []

    def replay(self, name: str, batch: Batch, rows: Sequence[npt.NDArray[np.intp]], *_: object) -> Any:
        self.batches.append((name, batch))
        self.ids.append((name, [set(batch["row_ids"][mine].tolist()) for mine in rows]))
        return []

    submit = replay


def step(config: Config, batch: Batch) -> Recorded:
    plan = RunPlan.of(config)
    recorded: Any = Recorded({name: load_phase(config, name) for name in column_phases(config, plan).train})
    splits = split_minibatches(config, batch)
    parts: Any = dict.fromkeys(("train", "stop", "log", "thread"))
    trainer = PolicyTrainer(config, plan, replays=recorded, media=False, **parts)
    trainer.compute_columns(batch, splits, 1)
    trainer.submit_steps(batch, 1, splits)
    return recorded  # type: ignore[no-any-return]


@given(data=st.data(), shards=st.integers(1, 3), minibatches=st.integers(1, 3), each=st.integers(1, 4))
def test_a_shard_trains_on_the_rows_that_it_computed(data: st.DataObject, shards: int, minibatches: int, each: int) -> None:
    size = shards * each
    lengths = data.draw(st.lists(st.integers(1, WIDTH), min_size=minibatches * size, max_size=minibatches * size))
    ids = step(configuration(size, shards), make_batch(lengths)).ids
    computed, trained = ([rows for name, rows in ids if name == phase] for phase in ("reference_logprobs", "train_step"))
    assert len(computed) == 1 and len(trained) == minibatches
    assert [set.union(*(rows[shard] for rows in trained)) for shard in range(shards)] == computed[0]
    assert all(len(rows) == minibatches * each for rows in computed[0]), "as many rows as its buckets have"
    assert set.union(*computed[0]) == {100 + row for row in range(len(lengths))}


def test_no_log_probability_passes_the_driver() -> None:
    """Per token it sends 36 bytes. With log-probabilities and entropy in the results and inputs of phases it would be 60."""
    rows = 32
    batches = step(configuration(rows, 2), make_batch([WIDTH] * rows)).batches
    assert [name for name, _ in batches] == ["logprobs", "reference_logprobs", "train_step"]
    by_token = sum(array.itemsize for _, batch in batches for array in batch.fields.values() if array.ndim == 2)
    assert by_token == 3 * 8 + 3 * 4, "token ids three times; mask, advantages and generation's log-probabilities once"
