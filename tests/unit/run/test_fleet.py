"""A fleet starts colocated groups in order, notices that a process of Ray has ended, and keeps nothing of such a cluster."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from dagrl.config.file import load_config
from dagrl.errors import ClusterError, DeadlineError, StopRequestedError, WorkerError
from dagrl.run.fleet import Fleet, start_groups
from dagrl.run.stop import StopSignal

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_quickstart.yaml"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What Ray says of this machine's node: that it `lives`."""
    node = SimpleNamespace(lives=True)
    monkeypatch.setattr("dagrl.run.fleet.node_lives", lambda: node.lives)
    return node


def test_a_cluster_with_a_dead_node_is_given_up(node: SimpleNamespace) -> None:
    """Its processes are there, but the raylet has hung for so long that Ray starts no workers on it any more."""
    fleet = Fleet(restarts=1)
    fleet._joined = True
    fleet.leave(WorkerError(()))
    assert fleet._joined
    node.lives = False
    fleet.check()
    with pytest.raises(ClusterError, match="node of this machine is dead"):
        fleet.check_node()
    fleet.leave(WorkerError(()))
    assert not fleet._joined


def test_a_start_of_ray_that_fails_asks_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is raised as it is. Ray, which has not started, could only answer with an error of its own."""

    def node_lives() -> bool:
        raise AttributeError("'Worker' object has no attribute 'gcs_client'")

    monkeypatch.setattr("dagrl.run.fleet.node_lives", node_lives)
    Fleet(restarts=1).leave(DeadlineError("the lease of the workers did not answer"))


def test_a_cluster_without_its_raylet_is_given_up(tmp_path: Path) -> None:
    sleep = shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    fleet = Fleet(restarts=1)
    with subprocess.Popen([str(sleep), "60"]) as raylet:
        fleet._joined, fleet._processes = True, [raylet]
        fleet.check()
        fleet.leave(WorkerError(()))
        assert fleet._joined, "a restart uses the cluster"
        raylet.kill()
        raylet.wait()
        with pytest.raises(ClusterError, match=rf"raylet \(pid {raylet.pid}\) ended under the run"):
            fleet.check()
        fleet.leave(WorkerError(()))
    assert not fleet._joined, "a restart starts another one"


def test_a_start_is_given_up_on_request_and_without_its_raylet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the driver 60 s after its GCS, without a message of ours."""
    monkeypatch.setattr("dagrl.run.fleet.start_groups", lambda config, roles, stack, check, owner: check())
    fleet, stop, config = Fleet(), StopSignal(), load_config(EXAMPLE)
    sleep = shutil.copy(shutil.which("sleep") or "", tmp_path / "gcs_server")
    with subprocess.Popen([str(sleep), "60"]) as server:
        fleet._processes = [server]
        fleet.groups(config, {"train"}, stop)
        stop.requested = True
        with pytest.raises(StopRequestedError):
            fleet.groups(config, {"train"}, stop)
        stop.requested = False
        server.kill()
        server.wait()
        with pytest.raises(ClusterError, match=r"gcs_server .* ended under the run"):
            fleet.groups(config, {"train"}, stop)


class RecordedGroup:
    """Stands for a group of workers: notes what is asked of it, and by which role."""

    def __init__(self, role: str, noted: list[tuple[str, ...]]) -> None:
        self.role, self.owned, self._noted = SimpleNamespace(name=role), False, noted

    def call(self, method: str, *args: object) -> None:
        self._noted.append((self.role.name, method))

    def call_function(self, function: object, *args: object) -> list[dict[str, float]]:
        return [{}]


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ([], [("train", "starts"), ("train", "offload"), ("generation", "starts")]),
        (["start_together=true"], [("generation", "starts"), ("train", "starts"), ("train", "offload")]),
        (["exchange=never"], [("generation", "starts"), ("train", "starts")]),
    ],
)
def test_colocated_groups_start_one_after_the_other_unless_both_fit(
    keys: list[str], order: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[str, ...]] = []
    generation_started = threading.Event()

    def create(role: str, *args: object, before_setup: Callable[[], object] | None, **options: object) -> RecordedGroup:
        if before_setup is not None:
            before_setup()
        elif role == "train" and keys:  # training starts slowly
            assert generation_started.wait(60)
        noted.append((role, "starts"))
        if role == "generation":
            generation_started.set()
        return RecordedGroup(role, noted)

    monkeypatch.setattr("dagrl.run.fleet.WorkerGroup.create", create)
    colocated = [f"policy.generation.colocated.{key}" for key in ("enabled=true", *keys)]
    config = load_config(EXAMPLE, [*colocated, "policy.megatron_cfg.data_parallel_size=1"])
    with ExitStack() as stack:
        start_groups(config, {"train", "generation"}, stack, lambda: None)
        assert noted == order
