"""Every dispatch mode of verl, in each kind of its worker groups: what a replay returns is what verl's own call returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import transfer_queue
from tensordict import TensorDict
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.utils import tensordict_utils as tu

from dagrl.embed.verl import accelerate
from dagrl.errors import GraphError, PhaseError, WorkerError
from tests.peers.verl_workers import WORKERS, colocated, fused, plain, proto, tensor_dict

pytestmark = pytest.mark.usefixtures("verl_cluster")


@pytest.fixture(scope="module", params=[plain, colocated, fused])
def groups(verl_cluster: None, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    made = request.param()
    yield made
    for actor in made["actor"].workers:
        ray.kill(actor)


@pytest.fixture(scope="module")
def actor(groups: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    fast = accelerate(groups["actor"])
    yield groups["actor"], fast
    fast.close()


def same(ours: Any, theirs: Any) -> None:
    """Asserts that two results are equal in type and content."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, DataProto):
        assert torch.equal(ours.batch["x"], theirs.batch["x"])
        assert ours.meta_info == theirs.meta_info
    elif isinstance(theirs, TensorDict):
        assert set(ours.keys()) == set(theirs.keys())
        assert torch.equal(ours["x"], theirs["x"])
        assert torch.equal(ours["y"], theirs["y"])
        assert torch.equal(ours["ids"].values(), theirs["ids"].values())
        assert torch.equal(ours["ids"].offsets(), theirs["ids"].offsets())
        assert tu.get(ours, "name") == tu.get(theirs, "name")
        assert tu.get(ours, "words") == tu.get(theirs, "words")
    else:
        assert ours == theirs


CALLS: dict[str, Any] = {
    "one to all": lambda group: group.one_to_all(2, add=5),
    "all to all": lambda group: group.all_to_all([4, 5, 6, 7]),
    "all to all, one value": lambda group: group.all_to_all(4),
    "dp compute": lambda group: group.dp_compute([1, 2, 3, 4]),
    "proto": lambda group: group.dp_compute_proto(proto()),
    "metric": lambda group: group.metric(proto()),
    "mesh, TensorDict": lambda group: group.over_mesh(tensor_dict()),
    "mesh, two of them": lambda group: group.over_mesh(tensor_dict(), other=tensor_dict()),
    "rank zero": lambda group: group.on_rank_zero("a"),
    "function": lambda group: group.execute_with_func_generator(scaled, proto()),
    "not blocking": lambda group: group.later(proto()).get(),
    "mesh, not blocking": lambda group: group.over_mesh_later(tensor_dict()).get(),
}


def scaled(worker: Any, data: DataProto) -> DataProto:
    data.batch["x"] = data.batch["x"] * worker.world_size
    return data


@pytest.mark.parametrize("call", CALLS)
def test_a_replay_returns_what_verl_returns(actor: tuple[Any, Any], call: str) -> None:
    theirs, ours = actor
    same(CALLS[call](ours), CALLS[call](theirs))


@pytest.fixture(scope="module")
def queue(verl_cluster: None) -> Iterator[None]:
    transfer_queue.init()
    yield
    transfer_queue.close()


def test_batches_stay_in_the_queue_of_the_ppo_trainer(queue: None, actor: tuple[Any, Any]) -> None:
    """verl's PPO trainer sends the keys of rows in TransferQueue; its workers read the rows, and write results there."""
    made = []
    for name, group in zip(("theirs", "ours"), actor, strict=True):
        keys = [f"{name} {row}" for row in range(8)]
        rows = tensor_dict().select("x", "ids")
        batch = transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=rows)
        batch.extra_info = {"name": "batch"}
        result = group.over_ranks(batch)
        assert type(result) is type(batch)
        assert result.keys == keys
        made.append((transfer_queue.kv_batch_get_by_meta(result)["y"], result.extra_info))
    assert torch.equal(made[1][0], made[0][0])
    assert made[1][1] == made[0][1]


def test_a_result_under_way_is_an_argument(actor: tuple[Any, Any]) -> None:
    """verl's own workers would wait for it on their event loops, where the calls that it comes from may still wait."""
    theirs, ours = actor
    same(ours.dp_compute_proto(ours.later(proto())), theirs.dp_compute_proto(theirs.later(proto()).get()))


def test_rows_that_do_not_divide_are_padded_and_cut_as_verl_does(actor: tuple[Any, Any]) -> None:
    results = []
    for group in actor:
        results.append(group.dp_compute_proto(proto(6, auto_padding=True)))
    assert len(results[0]) == 6
    assert torch.equal(results[0].batch["x"], results[1].batch["x"])


def test_other_members_match_the_group(actor: tuple[Any, Any]) -> None:
    theirs, ours = actor
    assert isinstance(ours, type(theirs))
    assert ours.workers is theirs.workers
    assert ours.world_size == WORKERS
    assert isinstance(ours.later(proto()), DataProtoFuture)


def test_calls_that_verl_sends_itself_keep_their_place(actor: tuple[Any, Any]) -> None:
    _, ours = actor
    before = len(ours.history()[0])
    pending = ours.later(proto())
    references = ours.references(5)
    ours.one_to_all(1)
    assert ray.get(references) == [5 + rank for rank in range(WORKERS)]
    pending.get()
    assert [calls[before:] for calls in ours.history()] == [["later", "references", "one_to_all"]] * WORKERS


def test_what_a_worker_raises_names_the_worker_and_the_method(actor: tuple[Any, Any]) -> None:
    _, ours = actor
    with pytest.raises(PhaseError, match="rank 1 was told to fail with 5") as caught:
        ours.fail(5)
    assert "'fail'" in caught.value.__notes__[0]
    assert ours.all_to_all(1) == [10, 11, 12, 13]  # the graph is whole


def test_colocated_roles_share_one_graph(groups: dict[str, Any], actor: tuple[Any, Any]) -> None:
    if "critic" not in groups:
        pytest.skip("a plain group has one role")
    critic = accelerate(groups["critic"])
    same(critic.dp_compute_proto(proto()), groups["critic"].dp_compute_proto(proto()))
    assert critic.one_to_all(10) == [3] * WORKERS
    same(actor[1].dp_compute_proto(proto()), actor[0].dp_compute_proto(proto()))


def test_phases_choose_the_methods(groups: dict[str, Any], actor: tuple[Any, Any]) -> None:
    some = accelerate(groups["actor"], phases=["dp_compute_proto"])
    assert type(some.dp_compute_proto).__name__ == "Accelerated"
    assert type(some.one_to_all).__name__ != "Accelerated"
    same(some.one_to_all(2), groups["actor"].one_to_all(2))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (["update_actor"], "has no method 'update_actor'; it has .*dp_compute_proto"),
        (["own_mode"], "'own_mode' has the dispatch mode .* not one of verl's own. Leave it out of `phases`"),
        (["references"], "'references' does not block and returns object references"),
    ],
)
def test_methods_that_cannot_run_so_are_refused(groups: dict[str, Any], phases: list[str], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        accelerate(groups["actor"], phases=phases)


def test_only_a_group_of_verls_is_taken_and_only_once(actor: tuple[Any, Any]) -> None:
    with pytest.raises(GraphError, match="takes a verl RayWorkerGroup, but was given a list"):
        accelerate([1])
    with pytest.raises(GraphError, match="is accelerated already"):
        accelerate(actor[1])


def test_an_actor_that_died_before_is_named() -> None:
    group = plain()["actor"]
    group.one_to_all(1)
    ray.kill(group.workers[2])
    with pytest.raises(WorkerError, match=r"rank 2|worker 2|verl\[2\]"):
        accelerate(group)
    for worker in group.workers:
        ray.kill(worker)
