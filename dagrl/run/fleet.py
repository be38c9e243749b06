"""The Ray cluster and the worker groups of a run. A restart keeps what lives of both.

    with Fleet(restarts) as fleet:
        for each attempt:
            fleet.join(config)                     # starts Ray, the first time
            groups = fleet.groups(config, plan, stop, warm_up)     # starts the workers, or revives the dead ones
            ...
            fleet.settle()                         # the attempt has reached its first step
            fleet.leave(error)                     # ends everything, unless a restart may follow

Workers that can be set up again keep their processes, and with them all imports. An attempt that failed before its first
step is followed by one with new processes.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from threading import Event
from types import TracebackType
from typing import Any, Self

from dagrl.config import Config
from dagrl.config.plan import GroupStart, RunPlan
from dagrl.config.roles import GENERATION, role_config
from dagrl.errors import ClusterError, DeadlineError, WorkerError
from dagrl.machine import gpu_count
from dagrl.run.cluster import LOGS, gpus_per_worker, ray_cluster, require_no_ray
from dagrl.run.colocated import TRAIN_PARTS
from dagrl.run.fork_server import ForkServer, Kind, Server, base_environment, forks_here
from dagrl.run.local_cluster import cluster_processes, ended_processes, nodes_live
from dagrl.run.preflight import Early, Inputs, check_room, worker_classes
from dagrl.run.stop import StopSignal
from dagrl.run.worker_protocols import required_protocols
from dagrl.runtime.actors import GpuBundles, Resources
from dagrl.runtime.worker_group import Revival, WorkerGroup, revive, shutdown_groups

logger = logging.getLogger(__name__)

WarmUp = Callable[[Sequence[WorkerGroup], Callable[[], None]], None]
"""Warms up groups that have started, while others start. Its second argument raises if these have failed."""


class Fleet(Early):
    """See the module's docstring. A context manager. `roles`: those whose workers will start (None: all)."""

    def __init__(self, restarts: int = 0, server: Server | None = None, roles: Collection[str] | None = None) -> None:
        require_no_ray()
        self.restarts = restarts  # that may still follow
        self._server = server  # which imports already
        self._roles = roles
        self.inputs: Inputs | None = None  # of the first attempt: data and Hub may have changed since, or be out of reach
        self.progressed = False  # the attempt has finished a step
        self._cluster = ExitStack()
        self._workers = ExitStack()
        self._forks: ForkServer | None = None
        self._starting: Future[None] | None = None
        self._joined = self._settled = False
        self._groups: list[WorkerGroup] = []
        self._processes: list[Popen[Any]] = []  # of Ray, if `join` started it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave(None)

    def begin_imports(self, config: Config, classes: Mapping[str, type]) -> None:
        """Begins to import what the workers will need, if they are forked from that."""
        same = bool(gpus_per_worker(config.cluster)) == bool(gpu_count())  # imports see the GPUs that workers will
        if same and forks_here(config.cluster):
            own = {role: worker for role, worker in classes.items() if self._roles is None or role in self._roles}
            self._forks = fork_server(config, own, self._server)
        if self._forks is not None:
            self.apart = self._forks.call
        elif self._server is not None:
            self._server.kill()

    def begin_cluster(self, config: Config) -> None:
        """Begins to start Ray, if it starts on this machine."""
        if config.cluster.address is None:
            cluster = ray_cluster(config.cluster, teardown_s=config.timeouts.teardown_s)
            self._starting = self._cluster.enter_context(entered_beside(cluster))

    def join(self, config: Config) -> None:
        """Starts Ray or joins its cluster, unless that is done."""
        if self._joined:
            return
        if self._starting is not None:
            self._starting.result()
        else:
            self._cluster.enter_context(ray_cluster(config.cluster, teardown_s=config.timeouts.teardown_s))
        self._joined = True
        self._processes = cluster_processes()

    def after_step(self) -> None:
        """Notes that the attempt has finished a step. Raises ClusterError if Ray has ended."""
        self.progressed = True
        self.check()

    def check(self) -> None:
        """Raises ClusterError if a process of the Ray that `join` started has ended: what still runs will not for long."""
        if ended := ended_processes(self._processes):
            raise ClusterError(
                f"Ray's {' and '.join(ended)} ended under the run; expected: alive until its end. Look into "
                f"{LOGS}, and at the machine's memory. To go on: checkpointing.resume=true"
            )

    def check_nodes(self, nodes: Collection[str] = ()) -> None:
        """Raises ClusterError if Ray cannot start workers on these nodes (by id), or this machine, any more. Asks Ray."""
        self.check()
        if not nodes_live(nodes):
            raise ClusterError(
                "a node of Ray is dead, or Ray's GCS does not answer; expected: alive until the run's end. Was a machine "
                "stopped, or out of memory? To go on: checkpointing.resume=true"
            )

    def groups(self, config: Config, plan: RunPlan, stop: StopSignal, warm_up: WarmUp) -> list[WorkerGroup]:
        """Returns the groups of the run, set up: new ones, or those of the last attempt with dead workers replaced.

        `warm_up` may be called with those that are ready first. Raises if a stop is requested or Ray has ended.
        """

        def check() -> None:
            stop.check()
            self.check_nodes()

        whole, self._settled = self._settled and not plan.colocated, False
        if self._groups and whole:
            self._revive(config, check, warm_up)
        else:
            self._workers.close()
            self._groups = start_groups(config, plan, self._workers, check, warm_up, self._forks)
        return self._groups

    @contextmanager
    def single_group(self, config: Config, role: str) -> Iterator[WorkerGroup]:
        """Opens the workers of `role` alone, each on GPUs of its own, for `dagrl evaluate` and `dagrl export`."""
        layout = RunPlan.of(config).layouts[role]
        check_room(config, layout.world_size, f"{layout.world_size} {role} ({layout.describe()})")
        self.join(config)
        executable = None if self._forks is None else self._forks.executable(role)
        resources = Resources(num_gpus=gpus_per_worker(config.cluster))
        group = _create_group(config, RunPlan.of(config), role, resources, py_executable=executable)
        try:
            yield group
        finally:
            shutdown_groups([group], config.timeouts.teardown_s / 2)

    def settle(self) -> None:
        """Notes that the groups work."""
        self._settled = True

    def leave(self, error: BaseException | None) -> None:
        """Ends the workers and Ray, unless `error` may be followed by a restart."""
        if self.restarts and isinstance(error, WorkerError | DeadlineError) and self._joined:
            with suppress(ClusterError):  # then nothing lives that a restart could use
                self.check_nodes()
                return
        try:
            self._workers.close()
        finally:
            self._cluster.close()
            if self._forks is not None:
                self._forks.end()
                self._forks, self.apart = None, partial
            self._starting = None
            self._groups, self._processes, self._joined, self._settled = [], [], False, False

    def _revive(self, config: Config, check: Callable[[], None], warm_up: WarmUp) -> None:
        """Replaces dead workers, in all groups at once. `warm_up` is called with the groups that are ready first."""
        begin = time.monotonic()
        with _side_by_side(check) as (pool, check_all):

            def revived(group: WorkerGroup) -> Revival:
                with group.waiting(check_all):
                    return revive(group, rest_s=config.timeouts.teardown_s)

            revivals = [pool.submit(revived, group) for group in self._groups]
            wait(revivals, return_when=FIRST_COMPLETED)
            pairs = zip(self._groups, revivals, strict=True)
            ready = [group for group, revival in pairs if revival.done() and revival.result()]
            if len(ready) < len(self._groups):
                warm_up(ready, check)
        for group, revival in zip(self._groups, revivals, strict=True):
            logger.info("%s: %s", group.role.name, revival.result())
        logger.info("all workers are ready again after %.1f s", time.monotonic() - begin)


@contextmanager
def entered_beside(context: AbstractContextManager[None]) -> Iterator[Future[None]]:
    """Enters `context` in a thread, which lives until the block ends: Ray's processes end with the thread that started them.

    Yields the future of its entry. Leaves it in this thread, if it was entered.
    """
    entered, left = Future[None](), Event()

    def enter() -> None:
        try:
            context.__enter__()
        except BaseException as error:
            entered.set_exception(error)
            return
        entered.set_result(None)
        left.wait()

    threading.Thread(target=enter, name="dagrl-cluster", daemon=True).start()
    with ExitStack() as stack:
        stack.callback(left.set)
        try:
            yield entered
        finally:
            if entered.exception() is None:
                context.__exit__(None, None, None)


@contextmanager
def _side_by_side(check: Callable[[], None]) -> Iterator[tuple[Executor, Callable[[], None]]]:
    """Opens threads for groups that start, and yields what they call instead of `check`: it also raises if the block did."""
    failed = Event()

    def check_all() -> None:
        check()
        if failed.is_set():
            raise CancelledError

    with ThreadPoolExecutor() as pool:
        try:
            yield pool, check_all
        except BaseException:
            failed.set()
            raise


def fork_server(config: Config, classes: Mapping[str, type], server: Server | None) -> ForkServer | None:
    """Starts to import what checks and workers will need; None if no worker class says what that is.

    The models are in directories by the time the workers start, as their environment says.
    """
    kinds = {}
    for role, worker in classes.items():
        if hasattr(worker, "imports") and hasattr(worker, "environment"):
            own = role_config(config, role)
            local = own.with_keys({"policy.model_name": str(Path.cwd())})
            kind = Kind(worker.imports(own), worker.environment(local))
            if base_environment().items() <= kind.environment.items():
                kinds[role] = kind
    return ForkServer(kinds, config.cluster.keep_imports_s, server, config.timeouts.start_s) if kinds else None


def _create_group(config: Config, plan: RunPlan, role: str, resources: Resources, **options: Any) -> WorkerGroup:
    """Starts the workers of a role. `options` are further ones of `WorkerGroup.create`."""
    return WorkerGroup.create(
        role,
        worker_classes(config, plan)[role],
        plan.layouts[role],
        role_config(config, role),
        protocols=required_protocols(config, plan)[role],
        resources=resources,
        seed=config.seed,
        start_timeout_s=config.timeouts.start_s,
        collective_timeout_s=config.timeouts.collective_s,
        **options,
    )


def start_groups(
    config: Config,
    plan: RunPlan,
    stack: ExitStack,
    check: Callable[[], None],
    warm_up: WarmUp = lambda groups, check: None,
    forks: ForkServer | None = None,
) -> list[WorkerGroup]:
    """Starts the groups of the run as `plan.start` says. `check` is called again and again, and may raise to give up.

    They spend long on imports, so they start in parallel, in threads of their own. While generation starts, `warm_up` is
    called with the other groups, unless these may have to make room on its GPUs.
    """
    resources = shared_resources(config, plan, stack)
    started: list[WorkerGroup] = []
    stack.callback(shutdown_groups, started, config.timeouts.teardown_s / 2)
    starting = dict[str, Future[WorkerGroup]]()

    def check_started() -> None:
        check()
        for future in starting.values():
            if future.done():
                future.result()

    with _side_by_side(check) as (pool, check_all):
        for start in plan.start.groups:
            before = starting[start.after].result if start.after is not None else None
            own = resources.get(start.role, Resources(num_gpus=gpus_per_worker(config.cluster)))
            starting[start.role] = pool.submit(_start_group, config, plan, start, own, started, before, check_all, forks)
        if plan.start.early:
            warm_up([future.result() for role, future in starting.items() if role != GENERATION], check_started)
    groups = {role: future.result() for role, future in starting.items()}  # raises the error of one that did not start
    for start in plan.start.groups:
        if start.leaves and plan.start.resident:
            groups[start.role].call("reload", TRAIN_PARTS)
    return list(groups.values())


def _start_group(
    config: Config,
    plan: RunPlan,
    start: GroupStart,
    resources: Resources,
    started: list[WorkerGroup],
    before_setup: Callable[[], object] | None,
    check: Callable[[], None],
    forks: ForkServer | None,
) -> WorkerGroup:
    """Starts one group, adds it to `started`, and moves its train state to the host if the plan says so."""
    begin = time.monotonic()
    executable = None if forks is None else forks.executable(start.role)
    group = _create_group(
        config, plan, start.role, resources, py_executable=executable, while_waiting=check, before_setup=before_setup
    )
    started.append(group)
    logger.info("%s workers started in %.1f s", start.role, time.monotonic() - begin)
    if forks is not None and (reasons := forks.refusals()):
        logger.info("not all workers could be forked: %s", reasons)
    if start.leaves:
        group.call("offload", TRAIN_PARTS)
    return group


def shared_resources(config: Config, plan: RunPlan, stack: ExitStack) -> dict[str, Resources]:
    """Returns the Ray resources of the roles that share GPUs; of others each worker requests its own.

    Equal ranks of these roles are on the same GPU. Empty without GPUs.
    """
    if not gpus_per_worker(config.cluster) or not plan.sharing:
        return {}
    bundles = GpuBundles(max(plan.layouts[role].world_size for role in plan.sharing), config.timeouts.start_s)
    stack.callback(bundles.release)
    shares = dict.fromkeys(plan.sharing, 1 / len(plan.sharing))
    if plan.colocated:
        shares = {**dict.fromkeys(plan.sharing, 0.5 / (len(plan.sharing) - 1)), GENERATION: 0.5}
    return {role: Resources(num_gpus=share, bundles=bundles) for role, share in shares.items()}
