"""NeMo-RL's calls as replays: equal to its plain calls, in their order, on actors of every kind."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from dagrl.embed.nemo_rl import AcceleratedGroup, accelerate
from dagrl.errors import GraphError, LayoutError, PhaseError, RunError, WorkerError
from tests.integration import nemo_rl_group
from tests.integration.nemo_rl_group import AsyncNotingWorker, NotingWorker

AXES = nemo_rl_group.TRAIN_AXES
LAYOUT = [[[[0, 1]], [[2, 3]]]]  # dp 2, tp 2


class Nll:
    """A loss function as NeMo-RL has them: an object that workers call."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, logprobs: torch.Tensor, data: Any) -> torch.Tensor:
        return -self.scale * (logprobs * data["mask"]).sum() / data["mask"].sum()


class PolicyWorker(NotingWorker):
    """A tiny model with the methods, and the keyword arguments, of NeMo-RL's policy workers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.begin()

    def begin(self) -> None:
        """Starts with new weights and without momentum. The first optimizer of torch in a process imports its compiler."""
        torch.manual_seed(self.seed)
        self.model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
        self.momentum = [torch.zeros_like(weight) for weight in self.model.parameters()]

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, gbs: int | None = None, mbs: int | None = None
    ) -> dict[str, Any]:
        self.history.append("train")
        loss = loss_fn(self._logprobs(data), data)
        if not eval_mode:
            weights = list(self.model.parameters())
            with torch.no_grad():
                for weight, momentum, gradient in zip(
                    weights, self.momentum, torch.autograd.grad(loss, weights), strict=True
                ):
                    weight -= 0.1 * momentum.mul_(0.9).add_(gradient)
        return {"loss": loss.detach(), "rows": len(data["input_ids"]), "gbs": gbs}

    def get_logprobs(self, *, data: Any, micro_batch_size: int | None = None) -> Any:
        self.history.append("get_logprobs")
        if data is None:
            return None
        with torch.no_grad():
            return type(data)({"logprobs": self._logprobs(data)})

    def _logprobs(self, data: Any) -> torch.Tensor:
        logits = self.model(data["input_ids"]).log_softmax(-1)
        return logits.gather(-1, data["input_ids"].roll(-1, 1)[..., None])[..., 0]


@pytest.fixture(scope="module", params=["signatures", "real"])
def nemo(request: pytest.FixtureRequest) -> Any:
    """NeMo-RL's classes: doubles of their signatures, and the real ones where they can be imported."""
    if request.param == "signatures":
        return nemo_rl_group
    pytest.importorskip("nemo_rl")
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.named_sharding import NamedSharding

    return SimpleNamespace(
        RayWorkerGroup=nemo_rl_group.real_group, NamedSharding=NamedSharding, BatchedDataDict=BatchedDataDict
    )


@pytest.fixture(scope="module")
def groups(cluster: None, nemo: Any) -> Iterator[tuple[Any, AcceleratedGroup]]:
    """A plain group of four workers, and an accelerated group of the same workers. `trainer_steps` resets them."""
    actors = [ray.remote(num_cpus=0)(PolicyWorker).remote(seed=rank) for rank in range(4)]
    plain, mine = (nemo.RayWorkerGroup(actors, nemo.NamedSharding(LAYOUT, AXES), "lm-policy") for _ in range(2))
    accelerated = accelerate(mine, phases=("train", "get_logprobs", "note", "refuse"), max_bytes=1 << 20, deadline_s=240.0)
    yield plain, accelerated
    assert accelerated.shutdown()


def batch(nemo: Any, step: int) -> Any:
    ids = torch.randint(11, (8, 16), generator=torch.Generator().manual_seed(step))
    return nemo.BatchedDataDict({"input_ids": ids, "mask": torch.ones(8, 16)})


def trainer_steps(group: Any, nemo: Any) -> list[Any]:
    """Runs three steps of NeMo-RL's `Policy` with its worker group."""
    found: list[Any] = []
    ray.get([worker.begin.remote() for worker in group.workers])
    replicated = ["context_parallel", "tensor_parallel", "pipeline_parallel"]
    axes = {"in_sharded_axes": ["data_parallel"], "replicate_on_axes": replicated, "output_is_replicated": replicated}
    for step in range(3):
        shards = batch(nemo, step).shard_by_batch_size(2, batch_size=None)
        common = {"micro_batch_size": 4}
        futures = group.run_all_workers_sharded_data("get_logprobs", data=shards, common_kwargs=common, **axes)
        found.append(nemo.BatchedDataDict.from_batches(group.get_all_worker_results(futures))["logprobs"])
        ray.get(group.run_all_workers_single_data("note", text=f"before {step}"))
        common = {"loss_fn": Nll(0.5 + step), "eval_mode": False, "gbs": 8, "mbs": None}
        futures = group.run_all_workers_sharded_data("train", data=shards, common_kwargs=common, **axes)
        found += [one for result in group.get_all_worker_results(futures) for one in result.values()]
    return found


def test_a_trainers_steps_are_equal_to_those_of_plain_calls(groups: tuple[Any, AcceleratedGroup], nemo: Any) -> None:
    plain, accelerated = groups
    expected, expected_calls = trainer_steps(plain, nemo), calls_of(plain)
    found = trainer_steps(accelerated, nemo)
    assert len(found) == len(expected) == 3 * 7
    assert all(torch.equal(torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(found, expected, strict=True))
    assert calls_of(accelerated) == expected_calls


def calls_of(group: Any) -> list[list[str]]:
    """Returns what each worker was called since it was last asked."""
    done: list[list[str]] = ray.get([worker.done.remote() for worker in group.workers])
    return done


def test_calls_reach_the_same_workers_as_in_nemo_rl(groups: tuple[Any, AcceleratedGroup], nemo: Any) -> None:
    shards = batch(nemo, 0).shard_by_batch_size(2, batch_size=None)

    def calls(group: Any) -> list[Any]:
        free = {"in_sharded_axes": ["data_parallel"], "data": shards}
        found = [
            ray.get(group.run_all_workers_multiple_data("note", text=list("abcd"), common_kwargs={"seconds": 0.0})),
            ray.get(group.run_all_workers_multiple_data("note", text=list("ef"), run_rank_0_only_axes=["tensor_parallel"])),
            ray.get(group.run_all_workers_single_data("note", text="g", run_rank_0_only_axes=["data_parallel"])),
            ray.get(group.run_single_worker_single_data("note", worker_idx=2, text="h")),
            len(group.get_all_worker_results(group.run_all_workers_sharded_data("get_logprobs", **free))),
        ]
        dummies = group.run_all_workers_sharded_data("get_logprobs", make_dummy_calls_to_free_axes=True, **free)
        return [*found, dummies.called_workers, dummies.return_from_workers, len(group.get_all_worker_results(dummies))]

    plain, accelerated = groups
    expected, expected_calls = calls(plain), calls_of(plain)
    assert calls(accelerated) == expected
    assert expected[:5] == [list("abcd"), list("ef"), ["g", "g"], "h", 2]
    assert calls_of(accelerated) == expected_calls
    with pytest.raises(ValueError, match="Axis 'data' not found in sharding annotations"):
        accelerated.run_all_workers_sharded_data("get_logprobs", in_sharded_axes=["data"], data=shards)


def test_errors_name_the_worker_and_the_group_goes_on(groups: tuple[Any, AcceleratedGroup], nemo: Any) -> None:
    _, accelerated = groups
    with pytest.raises(PhaseError, match=r"(?s)lm_policy worker 0.*refuse.*told to refuse 7"):
        ray.get(accelerated.run_all_workers_single_data("refuse", data=7))
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(accelerated.run_all_workers_single_data("note", text="slow", seconds=1.0), timeout=0.1)
    with pytest.raises(RunError, match=r"needs \d+ bytes per worker, .* room for 1056768; raise max_bytes of accel"):
        accelerated.run_all_workers_single_data("note", text="x" * (2 << 20))
    assert ray.get(accelerated.run_all_workers_single_data("note", text="on")) == ["on"] * 4


@pytest.mark.parametrize(
    ("worker", "options"),
    [(NotingWorker, {}), (NotingWorker, {"max_concurrency": 4}), (AsyncNotingWorker, {})],
    ids=["synchronous", "threaded", "async"],
)
def test_replays_and_plain_calls_keep_the_order_in_which_they_are_made(
    cluster: None, worker: type, options: dict[str, Any]
) -> None:
    actors = [ray.remote(num_cpus=0)(worker).options(**options).remote() for _ in range(2)]
    sharding = nemo_rl_group.NamedSharding([[[[0]], [[1]]]], AXES)
    mine = accelerate(nemo_rl_group.RayWorkerGroup(actors, sharding), phases=["note"], max_bytes=1 << 16, deadline_s=240.0)
    made: list[Any] = []
    plain, argument = ("prepare_for_generation", "tags") if worker is AsyncNotingWorker else ("later", "text")
    for number in range(4):  # nobody waits for a result before the next call
        made.append(mine.run_all_workers_single_data("note", text=f"replay {number}", seconds=0.02))
        made.append(mine.run_all_workers_single_data(plain, **{argument: f"plain {number}"}))
    for one in made:
        ray.get(one)
    history = ray.get(actors[1].done.remote())
    assert [one.split()[0] for one in history] == ["replay", "plain"] * 4
    assert mine.shutdown()


def test_mistakes_are_named_before_anything_is_compiled(cluster: None) -> None:
    actors = [ray.remote(num_cpus=0)(NotingWorker).remote() for _ in range(2)]
    sharding = nemo_rl_group.NamedSharding([[[[0]], [[1]]]], AXES)
    group = nemo_rl_group.RayWorkerGroup(actors, sharding, "policy")
    with pytest.raises(GraphError, match=r"the policy worker has no method 'noet'; it has .*note.* Correct the name"):
        accelerate(group, phases=["noet"])
    with pytest.raises(GraphError, match="phases is empty; name the methods"):
        accelerate(group, phases=[])
    with pytest.raises(LayoutError, match=r"a list has no workers, sharding_annotations, .*RayWorkerGroup of NeMo-RL"):
        accelerate(actors, phases=["note"])
    with pytest.raises(LayoutError, match="sharding_annotations are None; NeMo-RL's calls need a NamedSharding"):
        accelerate(nemo_rl_group.RayWorkerGroup(actors, None), phases=["note"])
    with pytest.raises(LayoutError, match="has 4 ranks, but the group has 2 workers; give it a NamedSharding of all"):
        accelerate(nemo_rl_group.RayWorkerGroup(actors, nemo_rl_group.NamedSharding(LAYOUT, AXES)), phases=["note"])
    ray.kill(actors[1])
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):  # on a busy machine, the process outlives the call by seconds
            ray.get(actors[1].note.remote("?", 0.05))
    with pytest.raises(WorkerError, match=r"policy worker 1 .*died"):
        accelerate(group, phases=["note"])
    ray.kill(actors[0])
