"""A fleet places and starts groups in order and notices the end of Ray; restarts go on from the newest checkpoint."""

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from dagrl import errors
from dagrl.config import Config
from dagrl.config.file import load_config
from dagrl.config.plan import RunPlan
from dagrl.errors import ClusterError, DagrlError, DeadlineError, PhaseError, WorkerError
from dagrl.run.fleet import Fleet, shared_resources, start_groups
from dagrl.run.preflight import Inputs
from dagrl.run.start import open_session
from dagrl.run.stop import StopSignal, no_restart_after_stop
from dagrl.run.train import run_with_restarts
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.record import RunPaths

EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo_quickstart.yaml"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces what Ray says of this machine's node: that it `lives`."""
    node = SimpleNamespace(lives=True)
    monkeypatch.setattr("dagrl.run.fleet.nodes_live", lambda nodes: node.lives)
    return node


def test_a_failed_start_of_ray_is_not_asked_about_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is raised as it is. Ray, which has not started, could only answer with an error of its own."""
    no_client = AttributeError("'Worker' object has no attribute 'gcs_client'")
    monkeypatch.setattr("dagrl.run.fleet.nodes_live", MagicMock(side_effect=no_client))
    Fleet(restarts=1).leave(DeadlineError("Ray did not answer"))


class RayProcess:
    """Stands for a process of Ray that lives until it is killed."""

    def __init__(self, name: str) -> None:
        self.args, self.pid, self.code = [f"/ray/{name}"], 7, None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


@pytest.mark.parametrize("hung", [False, True])
def test_a_cluster_without_its_raylet_is_given_up(hung: bool, node: SimpleNamespace) -> None:
    """Ended, or hung for so long that Ray starts no workers on its node any more."""
    raylet, fleet = RayProcess("raylet"), Fleet(restarts=1)
    fleet._joined, fleet._processes = True, [raylet]
    fleet.check()
    fleet.leave(WorkerError(()))
    assert fleet._joined, "a restart uses the cluster"
    node.lives, raylet.code = not hung, None if hung else -9
    with pytest.raises(ClusterError, match="a node of Ray is dead" if hung else r"raylet \(pid 7\) ended under the run"):
        fleet.check()
        fleet.check_nodes()
    fleet.leave(WorkerError(()))
    assert not fleet._joined, "a restart starts another one"


def test_a_start_is_given_up_on_request_and_without_its_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the driver 60 s after its GCS, without a message of ours."""
    monkeypatch.setattr("dagrl.run.fleet.start_groups", lambda config, plan, stack, check, *others: check())
    fleet, stop, config, server = Fleet(), StopSignal(), load_config(EXAMPLE), RayProcess("gcs_server")
    fleet._processes = [server]
    fleet.groups(config, RunPlan.of(config), stop, MagicMock())
    stop.requested = True
    with pytest.raises(errors.StopRequestedError):
        fleet.groups(config, RunPlan.of(config), stop, MagicMock())
    stop.requested = False
    server.kill()
    with pytest.raises(ClusterError, match=r"gcs_server .* ended under the run"):
        fleet.groups(config, RunPlan.of(config), stop, MagicMock())


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
        (["start_together=true"], [("generation", "starts"), ("train", "starts")]),
        (["start_together=true", "exchange=always"], [("generation", "starts"), ("train", "starts"), ("train", "offload")]),
        (["exchange=never"], [("generation", "starts"), ("train", "starts")]),
    ],
)
def test_colocated_groups_start_one_after_the_other_unless_both_fit(keys: Any, order: Any, monkeypatch: Any) -> None:
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
    with ExitStack() as stack:
        start_groups(config := colocated(*keys), RunPlan.of(config), stack, lambda: None)
        assert noted == order


def colocated(*keys: str) -> Config:
    sections = [f"policy.generation.colocated.{key}" for key in ("enabled=true", *keys)]
    return load_config(EXAMPLE, [*sections, "policy.megatron_cfg.data_parallel_size=1"])


def test_imports_that_no_worker_can_be_forked_from_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not see the GPUs that the workers will, or no worker class says what it imports."""
    config = load_config(EXAMPLE)
    for gpus, classes in ((1, {}), (0, {"train": object})):
        monkeypatch.setattr("dagrl.run.fleet.gpu_count", lambda gpus=gpus: gpus)
        server = MagicMock()
        Fleet(server=server).begin_imports(config, classes)
        server.kill.assert_called_once_with()


class SlowGeneration:
    """Stands for `WorkerGroup.create`: generation starts once `go_on` is set, and raises `error` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go_on, self.error, self.noted = threading.Event(), error, list[tuple[str, ...]]()
        monkeypatch.setattr("dagrl.run.fleet.WorkerGroup.create", self.create)

    def create(self, role: str, *args: object, while_waiting: Callable[[], None], **options: object) -> RecordedGroup:
        while role == "generation" and not self.go_on.wait(0.01):
            while_waiting()
        if role == "generation" and self.error is not None:
            raise self.error
        self.noted.append((role, "starts"))
        return RecordedGroup(role, self.noted)


TOGETHER = colocated("start_together=true")


APART, STAYS = load_config(EXAMPLE), colocated("exchange=never")


@pytest.mark.parametrize(("config", "early"), [(APART, True), (STAYS, True), (TOGETHER, False), (colocated(), False)])
def test_training_is_warmed_up_while_generation_starts_where_it_stays(config: Config, early: bool, monkeypatch: Any) -> None:
    slow = SlowGeneration(monkeypatch)

    def meanwhile(groups: Sequence[WorkerGroup], check: Callable[[], None]) -> None:
        check()
        slow.noted.append((*(group.role.name for group in groups), "is warmed up"))
        slow.go_on.set()

    if not early:
        slow.go_on.set()
    with ExitStack() as stack:
        groups = start_groups(config, RunPlan.of(config), stack, lambda: None, meanwhile)
    assert [group.role.name for group in groups] == ["train", "generation"]
    if early:
        assert slow.noted == [("train", "starts"), ("train", "is warmed up"), ("generation", "starts")]
    assert (("train", "is warmed up") in slow.noted) == early


def test_a_warm_up_that_fails_ends_the_start_of_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, ended = SlowGeneration(monkeypatch), list[WorkerGroup]()
    monkeypatch.setattr("dagrl.run.fleet.shutdown_groups", lambda groups, timeout_s: ended.extend(groups))
    warm_up = MagicMock(side_effect=PhaseError((), "out of memory"))
    with ExitStack() as stack, pytest.raises(PhaseError, match="out of memory"):
        start_groups(APART, RunPlan.of(APART), stack, lambda: None, warm_up)
    assert [group.role.name for group in ended] == ["train"] and slow.noted == [("train", "starts")]


def test_generation_that_fails_ends_the_warm_up_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowGeneration(monkeypatch, DeadlineError("no answer within timeouts.start_s"))

    def meanwhile(groups: Sequence[WorkerGroup], check: Callable[[], None]) -> None:
        check()
        slow.go_on.set()
        while True:  # phase after phase
            check()

    with ExitStack() as stack, pytest.raises(DeadlineError, match=r"timeouts\.start_s"):
        start_groups(APART, RunPlan.of(APART), stack, lambda: None, meanwhile)


def configuration(**keys: Any) -> Config:
    base: dict[str, Any] = {"name": "run", "algorithm": "sft", "policy": {}, "data": {}}
    return Config.model_validate({**base, **keys})


class Run:
    """Fails a number of times, and records whether each call resumed."""

    def __init__(self, failures: int, error: DagrlError | None = None, progresses: bool = True) -> None:
        self.failures, self.error, self.progresses = failures, error or PhaseError((), "a worker died"), progresses
        self.resumed: list[bool] = []

    def __call__(self, config: Config, *, fleet: Fleet) -> None:
        self.resumed.append(config.checkpointing.resume)
        fleet.progressed = self.progresses
        if len(self.resumed) <= self.failures:
            raise self.error


def test_a_failure_during_a_stop_does_not_restart() -> None:
    stop, runs = StopSignal(), []

    def run(config: Config, *, fleet: Fleet) -> None:
        runs.append(config.checkpointing.resume)
        fleet.progressed = True
        with no_restart_after_stop(stop):
            stop.requested = len(runs) == 2
            raise PhaseError((), "train worker 0 hung")

    with pytest.raises(errors.RunError, match="while it was stopping on request: train worker 0 hung"):
        run_with_restarts(run, configuration())
    assert runs == [False, True]


LOST = [PhaseError((), "a worker died"), WorkerError((), "a worker died as it saved"), DeadlineError("a save hung")]


@pytest.mark.parametrize("error", LOST)
def test_a_run_restarts_from_the_newest_checkpoint(error: DagrlError) -> None:
    run = Run(failures=2, error=error)
    run_with_restarts(run, configuration())
    assert run.resumed == [False, True, True]


def test_a_restart_does_not_read_data_and_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have changed since the run began, or the Hub may be down."""
    read = MagicMock(side_effect=lambda config, early: Inputs(config, {}, cast(Any, None), {}))
    prepare = MagicMock(side_effect=PhaseError((), "a worker died"))

    def run(config: Config, *, fleet: Fleet) -> None:
        fleet.progressed = True
        with open_session(config, None, fleet):
            pass

    monkeypatch.setattr("dagrl.run.start.preflight", read)
    monkeypatch.setattr("dagrl.run.start.prepare_run_directory", prepare)
    with pytest.raises(PhaseError):
        run_with_restarts(run, configuration(max_restarts=2, output_dir=str(tmp_path)))
    assert read.call_count == 1
    assert [call.args[0].checkpointing.resume for call in prepare.call_args_list] == [False, True, True]


def test_a_resumed_run_removes_part_of_a_checkpoint_before_it_writes(tmp_path: Path, monkeypatch: Any) -> None:
    """The part may have filled the disk."""
    config, left = configuration(output_dir=str(tmp_path), checkpointing={"resume": True}), list[bool]()
    paths = RunPaths.of(config)
    part = paths.checkpoints / "step_00000004.tmp" / "train"
    part.mkdir(parents=True)
    paths.config.touch()

    def prepare(*_: object) -> None:
        left.append(part.exists())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dagrl.run.start.preflight", lambda config, early: Inputs(config, {}, cast(Any, None), {}))
    monkeypatch.setattr("dagrl.run.start.prepare_run_directory", prepare)
    with pytest.raises(OSError, match="No space"), open_session(config, None, Fleet()):
        pass
    assert left == [False]


DIED = errors.WorkerFailure("train", 0, "", "here", 1, "train_step", 0, "", "died", "", "")


@pytest.mark.parametrize(
    ("error", "restarts"),
    [
        (PhaseError((DIED,)), True),
        (ClusterError("Ray ended"), True),
        (PhaseError((replace(DIED, kind="raised"),)), False),
        (DeadlineError("Ray has no GPU"), False),
    ],
)
def test_before_the_first_step_only_lost_processes_are_worth_a_restart(error: DagrlError, restarts: bool) -> None:
    run = Run(failures=1, error=error, progresses=False)
    with nullcontext() if restarts else pytest.raises(type(error)):
        run_with_restarts(run, configuration())
    assert run.resumed == ([False, True] if restarts else [False])


DIES = PhaseError((), "died")


@pytest.mark.parametrize(
    ("keys", "error", "resumed"),
    [
        ({"max_restarts": 2}, DIES, [False, True, True]),
        ({"on_failure": "stop"}, DIES, [False]),
        ({"checkpointing": {"enabled": False}}, DIES, [False]),
        ({}, errors.DataError("a line that is not JSON"), [False]),
    ],
)
def test_the_last_failure_is_raised(keys: dict[str, Any], error: DagrlError, resumed: list[bool]) -> None:
    run = Run(failures=9, error=error)
    with pytest.raises(type(error), match=str(error)):
        run_with_restarts(run, configuration(**keys))
    assert run.resumed == resumed


CRITIC = {"megatron_cfg": {"tensor_model_parallel_size": 2}}
SHARES = {**CRITIC, "colocated": True}
TEACHER = {"teacher": {"model_name": "m", "colocated": True}}
THIRDS = dict.fromkeys(("train", "critic", "teacher"), pytest.approx(1 / 3))


class Bundles:
    """In place of Ray's placement groups."""

    released = False

    def __init__(self, count: int, timeout_s: float) -> None:
        self.count = count

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize(
    ("sections", "engine", "devices", "shares"),
    [
        ({"critic": CRITIC}, False, 3 + 2 + 2, {}),
        ({"critic": SHARES, "models": TEACHER}, False, 3 + 2, THIRDS),
        ({"critic": CRITIC}, True, 3 + 2, {"train": 0.5, "generation": 0.5}),
        ({"critic": SHARES}, True, 3, {"train": 0.25, "critic": 0.25, "generation": 0.5}),
    ],
    ids=["apart", "a critic and a teacher", "generation", "a critic and generation"],
)
def test_shares_of_the_train_workers_gpus(sections: Any, engine: bool, devices: int, shares: Any, monkeypatch: Any) -> None:
    """Three train workers, two of generation and two of a critic, which are placed together where they share GPUs."""
    monkeypatch.setattr("dagrl.run.fleet.gpus_per_worker", lambda cluster: 1.0)
    monkeypatch.setattr("dagrl.run.fleet.GpuBundles", Bundles)
    vllm = {"data_parallel_size": 2}
    policy = {"megatron_cfg": {"data_parallel_size": 3}, "generation": {"vllm_cfg": vllm, "colocated": {"enabled": engine}}}
    config = configuration(algorithm="ppo", policy=policy, **sections)
    plan = RunPlan.of(config)
    assert plan.sharing == tuple(shares) and plan.devices == devices
    with ExitStack() as stack:
        found = shared_resources(config, plan, stack)
        assert {role: resources.num_gpus for role, resources in found.items()} == shares
        placed: Any = {id(one.bundles): one.bundles for one in found.values()}.values()
        assert [bundles.count for bundles in placed] == [3] * bool(shares)
    assert all(bundles.released for bundles in placed)
