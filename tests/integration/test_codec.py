"""Inputs and results of types that are not ours, with every executor: equal to plain calls, split and joined by the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import ray
import torch

from dagrl.errors import DataError, PhaseError, RunError
from dagrl.runtime.graph import Arguments
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.split import Codec
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.schedules import actors_of

Array = npt.NDArray[Any]

ENGINES = [("compiled", "dagrl"), ("compiled", "ray"), ("eager", "dagrl")]


class TensorTable:
    """Tensors with one batch dimension, a test double of TensorDict, DataProto and BatchedDataDict."""

    def __init__(self, tensors: dict[str, torch.Tensor], info: dict[str, Any]) -> None:
        self.tensors = tensors
        self.info = info

    def chunk(self, count: int) -> list[TensorTable]:
        parts = {name: tensor.chunk(count) for name, tensor in self.tensors.items()}
        return [TensorTable({name: mine[at] for name, mine in parts.items()}, self.info) for at in range(count)]

    @staticmethod
    def cat(parts: list[TensorTable]) -> TensorTable:
        names = parts[0].tensors
        return TensorTable({name: torch.cat([one.tensors[name] for one in parts]) for name in names}, parts[0].info)


TABLE = Codec(TensorTable.chunk, lambda parts: TensorTable.cat(parts) if isinstance(parts[0], TensorTable) else tuple(parts))


def every_nth(value: dict[str, Array], n: int) -> list[dict[str, Array]]:
    return [{name: array[at::n] for name, array in value.items()} for at in range(n)]


def interleaved(parts: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([one[name] for one in parts], 1).reshape(-1, *parts[0][name].shape[1:]) for name in parts[0]}


ROWS = Codec(every_nth, interleaved)


class Model:
    """Methods with the signatures of the fleets."""

    def get_logprobs(self, *, data: TensorTable) -> TensorTable:
        logits = data.tensors["logits"].to(torch.float64)
        found = logits.log_softmax(-1).gather(-1, data.tensors["ids"][..., None])[..., 0]
        return type(data)({"logprobs": found, "ids": data.tensors["ids"]}, data.info)

    def scale(self, arrays: dict[str, Array], factor: float) -> dict[str, Array]:
        return {name: array * factor for name, array in arrays.items()}

    def rows(self, data: TensorTable) -> int:
        return len(data.tensors["ids"])

    def in_place(self, data: TensorTable) -> float:
        data.tensors["logits"].zero_()
        return float(data.tensors["logits"].abs().sum())


@phase
def logprobs(train: Shard, data):
    return train[0].map("get_logprobs", data=data)


@phase
def scaled(train: Shard, arrays):
    return train[0].map("scale", arrays, factor=0.5)


@phase
def whole(train: Shard, arguments):
    return train.spread("rows", arguments)


@phase
def in_place(train: Shard, data):
    return train.map("in_place", data)


@pytest.fixture(scope="module")
def actors(cluster: None) -> Iterator[list[Any]]:
    with actors_of(Model, [()] * 4, groups={"_ray_system": 8}) as actors:
        yield actors


def table(rows: int, tokens: int) -> TensorTable:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, tokens, 5, generator=generator).to(torch.bfloat16)
    ids = torch.randint(5, (rows, tokens), generator=generator)
    return TensorTable({"logits": logits, "ids": ids}, {"temperature": 1.0, "names": ["a", "b"]})


def scheduler_of(actors: list[Any], executor: str, engine: str) -> Scheduler:
    group = WorkerGroup.from_actors(actors, ParallelLayout(dp=2, tp=2))
    options = SchedulerOptions(executor=executor, engine=engine, fallback="error")  # type: ignore[arg-type]
    return Scheduler([group], options)


@pytest.mark.parametrize(("executor", "engine"), ENGINES)
def test_values_of_any_type_are_split_and_joined_as_plain_calls_see_them(
    actors: list[Any], executor: str, engine: str
) -> None:
    arrays: dict[str, Array] = {"x": np.asfortranarray(np.arange(24.0).reshape(6, 4)), "flags": np.arange(6) > 2}
    with scheduler_of(actors, executor, engine) as scheduler:
        scheduler.add(logprobs, codec=TABLE, warmup_value=table(4, 4000), result_bytes=1 << 20)
        scheduler.add(scaled, codec=ROWS, input_bytes=1 << 16)
        scheduler.add(whole, warmup_value=Arguments((table(2, 3),)))
        scheduler.compile()
        scheduler.warmup()
        for rows, tokens in [(4, 4000), (2, 3), (4, 100)]:
            data = table(rows, tokens)
            joined = scheduler.replay(logprobs, data).result()
            plain = TensorTable.cat(
                ray.get(
                    [actor.get_logprobs.remote(data=part) for actor, part in zip(actors[::2], data.chunk(2), strict=True)]
                )
            )
            assert type(joined) is TensorTable and joined.info == plain.info
            for name, expected in plain.tensors.items():
                assert torch.equal(joined.tensors[name], expected) and joined.tensors[name].dtype == expected.dtype
        found = scheduler.replay(scaled, arrays).result()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], 0.5 * array)
        assert scheduler.replay(whole, Arguments((), {"data": table(2, 3)})).result() == ([2, 2], [2, 2])


@pytest.mark.parametrize(("executor", "engine"), ENGINES)
def test_a_method_that_changes_its_tensors_changes_no_others(actors: list[Any], executor: str, engine: str) -> None:
    data = table(4, 4000)
    total = float(data.tensors["logits"].abs().sum())
    with scheduler_of(actors, executor, engine) as scheduler:
        scheduler.add(in_place, codec=TABLE, warmup_value=data)
        scheduler.add(logprobs, codec=TABLE, warmup_value=data)
        scheduler.compile()
        for _ in range(4):
            assert scheduler.replay(in_place, data).result() == ([0.0, 0.0], [0.0, 0.0])
            joined = scheduler.replay(logprobs, data).result()
    assert float(data.tensors["logits"].abs().sum()) == total
    assert float(joined.tensors["logprobs"].sum()) != 0.0


def test_mistakes_of_codecs_and_values_are_named_before_anything_is_sent(actors: list[Any]) -> None:
    with scheduler_of(actors, "compiled", "dagrl") as scheduler:
        scheduler.add(logprobs, codec=TABLE, input_bytes=1 << 12)
        scheduler.add(scaled, codec=Codec(lambda value, n: [value]), input_bytes=1 << 12)
        scheduler.add(whole, codec=Codec(lambda value, n: [value] * n, lambda parts: parts[5]), input_bytes=1 << 16)
        scheduler.compile()
        with pytest.raises(
            DataError, match="'scaled' runs on 2 shards, but its codec split a dict into 1 parts; return one"
        ):
            scheduler.replay(scaled, {})
        with pytest.raises(RunError, match=r"input of phase 'logprobs' needs \d+ bytes per shard.* has room for 36864"):
            scheduler.replay(logprobs, table(4, 40000))
        with pytest.raises(DataError, match="phase 'logprobs': its codec cannot split a dict over 2 shards: AttributeError"):
            scheduler.replay(logprobs, {})
        with pytest.raises(RunError, match=r"an ObjectRef cannot be sent .* send the value itself"):
            scheduler.replay(whole, Arguments((ray.put(1),)))
        with pytest.raises(RunError, match=r"cannot be pickled .*generator"):
            scheduler.replay(whole, Arguments(number for number in range(3)))  # type: ignore[arg-type]
        with pytest.raises(PhaseError, match="results of its shards do not fit together: list index out of range"):
            scheduler.replay(whole, Arguments((table(2, 3),))).result()
