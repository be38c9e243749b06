"""A node's transport reaches Ray: NCCL asks for GPUs, which the actors here lack; the eager executor does without."""

import dataclasses
import logging
from collections.abc import Iterator

import pytest

from dagrl.errors import RunError
from dagrl.runtime.layout import ParallelLayout
from dagrl.runtime.phase import Shard, phase
from dagrl.runtime.worker_group import WorkerGroup
from tests.integration.fake_workers import FakeWorker
from tests.integration.schedules import actors_of, compiled, group_of


@phase
def over_nccl(train: Shard, value):
    first, second = train.stages()
    return second.map("add_one", first.map("add_one", value).via("nccl"))


@phase
def to_itself(train: Shard, value):
    first = train[0].map("add_one", value).via("nccl")
    return train[0].map("add_one", first)


@phase
def one(train: Shard, value):
    return train.map("add_one", value)


@phase
def another(train: Shard, value):
    return train.map("add_one", value)


@pytest.fixture(scope="module")
def group(cluster: None) -> Iterator[WorkerGroup]:
    with group_of(FakeWorker, pp=2) as group:
        group.role = dataclasses.replace(group.role, transports=frozenset({"shm", "nccl"}))
        yield group


def test_an_edge_over_nccl_needs_gpus(group: WorkerGroup) -> None:
    with pytest.raises(RunError, match=r"'over_nccl' could not be compiled: .*accelerator"):
        with compiled(group, {over_nccl: 0}):
            pass


def test_without_gpus_the_phase_runs_eagerly(group: WorkerGroup, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dagrl"), compiled(group, {over_nccl: 0}, fallback="eager") as scheduler:
        assert "runs eagerly" in caplog.text
        assert scheduler.replay(over_nccl, 40).result() == (42,)


def test_a_worker_passes_results_to_itself_without_a_transport(group: WorkerGroup) -> None:
    with compiled(group, {to_itself: 0}) as scheduler:
        assert scheduler.replay(to_itself, 40).result() == (42,)


def test_an_actor_without_a_second_thread_for_rays_engine_is_an_error_that_says_how_to_make_it(cluster: None) -> None:
    with (
        actors_of(FakeWorker, [(None, None)]) as actors,
        compiled(WorkerGroup.from_actors(actors, ParallelLayout()), {}, warm=False, engine="ray") as scheduler,
    ):
        scheduler.add(one, warmup_value=0)
        scheduler.options = dataclasses.replace(scheduler.options, compile_s=3.0)  # of what cannot be compiled alone
        scheduler.add(another, warmup_value=0)
        with pytest.raises(RunError, match=r"'another' could not be compiled: .* concurrency_groups"):
            scheduler.compile()
        assert scheduler.replay(one, 40).result() == (41,)
