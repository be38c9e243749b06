"""What every loop stands on: the run's directory and records, Ray, the worker groups, and the compiled phases.

`open_session` does everything between `preflight` and the first step, and undoes it at the end, whatever happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dagrl.annotate import enable_ranges
from dagrl.checkpoint import Checkpoint, CheckpointStore, TrainState
from dagrl.cluster import ray_cluster
from dagrl.config import Config
from dagrl.loops.colocated import TRAIN_PARTS, SharedDevices
from dagrl.loops.saving import CheckpointSaver
from dagrl.loops.stop import StopRequestedError, StopSignal, stop_on_signals
from dagrl.machine import gpus_per_worker
from dagrl.metrics import (
    IDLE,
    QUANTUM_OVERHEAD,
    TIMING,
    TOKENS_PER_SEC,
    TOKENS_PER_SEC_PER_GPU,
    StepMetrics,
    merge_step_metrics,
)
from dagrl.model_init import prepare_model
from dagrl.plot import plot_run
from dagrl.preflight import (
    Inputs,
    generation_config,
    is_colocated,
    layouts,
    limit_steps,
    load_phase,
    preflight,
    worker_classes,
)
from dagrl.progress import Progress
from dagrl.record import RunPaths, RunRecord, prepare_run_directory
from dagrl.refit.connect import connect_refit
from dagrl.replay import Replay, ReplayTiming
from dagrl.scheduler import Scheduler, SchedulerOptions
from dagrl.shapes import Batch, Bucket
from dagrl.timing import PhaseClock
from dagrl.trace import DRIVER, TraceEvent, TraceWriter
from dagrl.worker_group import GpuBundles, Resources, WorkerGroup

logger = logging.getLogger(__name__)


@dataclass
class Session:
    """One run, ready for its first step. `step` is the last finished step, over all stages.

    `savers` write what belongs to a checkpoint beside the workers' and the driver's state into its directory.
    """

    config: Config
    paths: RunPaths
    inputs: Inputs
    train: WorkerGroup
    generation: WorkerGroup | None
    scheduler: Scheduler
    record: RunRecord
    trace: TraceWriter | None
    progress: Progress
    clock: PhaseClock
    store: CheckpointStore
    stop: StopSignal
    resumed: Checkpoint | None
    step: int = 0
    saved_step: int = 0
    state: TrainState = field(default_factory=lambda: TrainState(step=0))
    timings: list[tuple[str, ReplayTiming]] = field(default_factory=list)  # by the phase's name in `phases`
    free: dict[str, float] = field(default_factory=dict)  # when each role's last replay was read
    savers: list[Callable[[Path], None]] = field(default_factory=list)
    shared: SharedDevices | None = None  # where train and generation workers share their GPUs

    def hold(self, *roles: str, keep_generation_weights: bool = False) -> None:
        """Give `roles` the memory they compute with; replays do so themselves, other calls of workers need it before."""
        if self.shared is not None:
            self.shared.give_to(roles, keep_generation_weights=keep_generation_weights)

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.config, self.store, self.train)

    def replay(self, name: str, value: object) -> Any:
        """Replay the phase `phases.<name>`, wait for it, and count its time and overhead."""
        self.hold(*load_phase(self.config.phases, name).roles)
        with self.clock.measure(name):
            return self._result(name, self.submit(name, value))

    def submit(self, name: str, value: object, rows: Sequence[npt.NDArray[np.intp]] | None = None) -> Replay:
        """Start a replay to be read by `collect`; `rows` are those of each shard (see `Scheduler.replay`)."""
        phase = load_phase(self.config.phases, name)
        self.hold(*phase.roles)
        return self.scheduler.replay(phase, value, rows=rows)

    def collect(self, name: str, replay: Replay) -> Any:
        """Wait for a replay started by `submit`, and count the time waited and the overhead."""
        with self.clock.measure(name):
            return self._result(name, replay)

    def _result(self, name: str, replay: Replay) -> Any:
        result = replay.result()
        assert replay.timing is not None
        self.timings.append((name, replay.timing))
        return result

    def lap(self, tokens: int) -> dict[str, float]:
        """Timing metrics of the step that ends here, in which `tokens` tokens were trained on.

        `replay_overhead_s` is the time of its replays in which no worker on the longest path was computing; `idle/<role>` is
        the share of the step in which the workers of a role ran no phase.
        """
        times = self.clock.lap()
        total = times[TIMING + "total"]
        counted, self.timings = self.timings, []
        batches = [timing.padding_share for _, timing in counted if timing.padding_share is not None]
        busy = {group.role.name: 0.0 for group in self.groups}
        overhead: dict[str, float] = {}
        for name, timing in counted:
            roles = load_phase(self.config.phases, name).roles
            idle = timing.overhead_s(max(self.free.get(role, 0.0) for role in roles))
            overhead[name] = overhead.get(name, 0.0) + idle
            for role in roles:
                busy[role] += timing.busy_s
                self.free[role] = timing.finished
        return {
            **_generation_timing(counted, overhead.get("generate", 0.0)),
            **times,
            **{f"{IDLE}{role}": max(0.0, 1.0 - seconds / total) for role, seconds in busy.items()},
            TOKENS_PER_SEC: tokens / total,
            TOKENS_PER_SEC_PER_GPU: tokens / total / devices_of(self.config),
            "replays": float(len(counted)),
            "replay_overhead_s": sum(overhead.values()),
            "padding_share": sum(batches) / len(batches) if batches else 0.0,
        }

    def train_on(self, phase: str, batch: Batch) -> dict[str, float]:
        """Replay a training (or evaluation) phase on a global batch; metrics over all shards."""
        mask = batch["loss_mask"].astype("float64")
        batch = batch.with_scalars(
            global_valid_tokens=float(mask.sum()), global_valid_sequences=float((mask.sum(axis=1) > 0).sum())
        )
        parts: Sequence[StepMetrics] = self.replay(phase, batch)
        return merge_step_metrics(parts).flat()

    def finish_step(self, stage: str, position: int, total: int, metrics: dict[str, float], state: TrainState) -> None:
        """Record a finished step, show it, and save if it is time to."""
        self.step = state.step
        self.state = state
        self.record.log(self.step, stage, metrics)
        self.progress.step(position, total, metrics, stage=stage)
        self.saver.poll()
        if self.config.checkpointing.enabled and self.step % self.config.checkpointing.save_period == 0:
            self.save()
        if self.step % TRACE_PERIOD == 0:
            self.write_trace()
        self.stop.check()

    def save_last(self) -> None:
        """Save a checkpoint of the last finished step, unless it is saved already, and wait until it is complete."""
        self.save()
        with self.clock.measure("checkpoint"):
            self.saver.finish()

    def save(self) -> None:
        """Save a checkpoint of the last finished step, unless it is saved already."""
        if self.step in (0, self.saved_step):
            return
        self.progress.status("saving a checkpoint")
        self.hold("train", keep_generation_weights=True)
        with self.clock.measure("checkpoint"):
            self.saver.save(self.state, self.savers)
        self.saved_step = self.step

    def write_trace(self) -> None:
        """Move what the workers remember of their replays into the trace file."""
        if self.trace is None:
            return
        for group in self.groups:
            for rank, runs in enumerate(group.drain_runs()):
                process = _process_label(group, rank)
                self.trace.write(
                    TraceEvent(
                        run.label.partition(".")[2],
                        "warm-up" if run.warmup else "replay",
                        run.start_ns,
                        run.end_ns - run.start_ns,
                        process,
                        "replays",
                        {"phase": run.phase, "replay": run.replay},
                    )
                    for run in runs
                )

    def finish(self) -> None:
        """Write what a finished run leaves: the last checkpoint, the policy for Hugging Face, the trace, the plot."""
        if self.config.checkpointing.enabled:
            self.save_last()
        if self.config.checkpointing.export_hf:
            self.progress.stage("Writing the final policy")
            self.hold("train", keep_generation_weights=True)
            self.train.call("export_hf", str(self.paths.final_model), timeout_s=self.config.timeouts.checkpoint_s)
            self.inputs.tokenizer.save_pretrained(self.paths.final_model)

    @property
    def groups(self) -> tuple[WorkerGroup, ...]:
        """The worker groups of the run."""
        return (self.train,) if self.generation is None else (self.train, self.generation)

    def metric(self, metrics: Mapping[str, float]) -> float | None:
        """What checkpoints are ranked by: `checkpointing.metric_name`, or the last value it had."""
        name = self.config.checkpointing.metric_name
        return None if name is None else metrics.get(name, self.state.metric)

    def summarize(self) -> None:
        """Plot what was recorded, and show where the time went and what was written; also of a run that failed."""
        if self.config.logger.plot_enabled and self.step:
            plot_run(self.paths.metrics, self.paths.plot, f"{self.config.name} ({self.config.algorithm})")
        self.progress.summary(self.clock.totals, self.paths.written())


def _generation_timing(counted: Sequence[tuple[str, ReplayTiming]], overhead_s: float) -> dict[str, float]:
    """What quanta cost beside the engines' own time."""
    quanta = sum(timing.busy_s for name, timing in counted if name == "generate")
    return {QUANTUM_OVERHEAD: overhead_s / (quanta + overhead_s)} if quanta else {}


TRACE_PERIOD = 20
"""Steps between two collections of the workers' trace events."""


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a loop, by its name in `phases.*`, and the shapes it will be replayed at (sequences and tokens a shard).

    `value` is what a phase that takes no batch is warmed up with.
    """

    name: str
    buckets: tuple[Bucket, ...] = ()
    result_bytes: int | None = None
    value: int | None = None


@contextmanager
def run_session(config: Config, plans: Sequence[PhasePlan]) -> Iterator[Session]:
    """`open_session` for a whole run: the block takes the steps.

    After it comes what a finished run leaves (`Session.finish`), or a checkpoint if a stop was asked for; in any case the
    plot and the summary.
    """
    with open_session(config, plans) as session:
        try:
            yield session
            session.finish()
        except StopRequestedError:
            session.save_last()
            raise
        finally:
            session.summarize()


@contextmanager
def open_session(config: Config, plans: Sequence[PhasePlan]) -> Iterator[Session]:
    """Everything up to the first step, and everything after the last.

    Raises a UserError before any actor starts for what can be known by then.
    """
    inputs = preflight(config)
    config = limit_steps(config, inputs)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        progress = stack.enter_context(Progress(config.logger))
        progress.stage("Preparing the run")
        paths = prepare_run_directory(config)
        model = prepare_model(config.policy, inputs.tokenizer, paths.init_model)
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"model_name": str(model.resolve())})})
        store = CheckpointStore(
            paths.checkpoints,
            keep_top_k=config.checkpointing.keep_top_k,
            higher_is_better=config.checkpointing.higher_is_better,
        )
        store.recover(resume=config.checkpointing.resume)
        resumed = store.latest() if config.checkpointing.resume else None
        record = stack.enter_context(RunRecord(config, resumed_step=resumed.state.step if resumed else 0))
        trace = stack.enter_context(TraceWriter(paths.trace)) if config.logger.trace_enabled else None
        progress.stage("Starting Ray")
        with stop.at_once():
            stack.enter_context(ray_cluster(config.cluster))
            stop.listen()
        progress.stage(f"Starting {_workers_text(config)}")
        train, generation = _start_groups(config, stack, stop)
        if config.logger.nvtx_enabled:
            for group in (train, *([generation] if generation else [])):
                group.call_function(enable_ranges)
        scheduler = stack.enter_context(Scheduler([g for g in (train, generation) if g], _options(config)))
        clock = PhaseClock(trace)
        session = Session(
            config, paths, inputs, train, generation, scheduler, record, trace, progress, clock, store, stop, resumed
        )
        if is_colocated(config):
            assert generation is not None and config.policy.generation is not None
            level = config.policy.generation.colocated.sleep_level
            session.shared = SharedDevices(train, generation, level, clock.measure)
        if trace is not None:
            trace.declare(
                [DRIVER, *(_process_label(g, rank) for g in session.groups for rank in range(g.layout.world_size))]
            )
        with stop.at_once():
            _compile(session, plans)
            _resume(session)
        stack.callback(session.write_trace)
        yield session


def _start_groups(config: Config, stack: ExitStack, stop: StopSignal) -> tuple[WorkerGroup, WorkerGroup | None]:
    """The train group and, where the run has one, the generation group.

    Side by side, as both spend long on imports; on shared GPUs in turn, the train state gone before generation starts.
    """
    places = shared_places(config, stack) if is_colocated(config) else {}

    def start(role: str) -> WorkerGroup:
        return WorkerGroup.create(
            role,
            worker_classes(config)[role],
            layouts(config)[role],
            config,
            resources=places.get(role, Resources(num_gpus=gpus_per_worker(config.cluster))),
            seed=config.seed,
            start_timeout_s=config.timeouts.start_s,
            collective_timeout_s=config.timeouts.collective_s,
            while_waiting=stop.check,
        )

    def keep(group: WorkerGroup) -> WorkerGroup:
        stack.callback(group.shutdown, config.timeouts.teardown_s / 2)
        return group

    if is_colocated(config):
        train = keep(start("train"))
        train.call("offload", TRAIN_PARTS)
        return train, keep(start("generation"))
    with ThreadPoolExecutor() as pool:
        starting = [pool.submit(start, role) for role in layouts(config)]
    for future in starting:
        if future.exception() is None:
            keep(future.result())
    train, *generation = [future.result() for future in starting]  # raises what a group could not start for
    return train, generation[0] if generation else None


def shared_places(config: Config, stack: ExitStack) -> dict[str, Resources]:
    """What the workers of each role ask of Ray to lie on the same GPUs, rank by rank; CPUs are shared anyway."""
    if not gpus_per_worker(config.cluster):
        return {}
    sizes = {role: layout.world_size for role, layout in layouts(config).items()}
    bundles = GpuBundles(max(sizes.values()), config.timeouts.start_s)
    stack.callback(bundles.release)
    share = generation_config(config).colocated.train_share
    return {role: Resources(num_gpus=share if role == "train" else 1 - share, bundles=bundles) for role in sizes}


def _compile(session: Session, plans: Sequence[PhasePlan]) -> None:
    config, scheduler = session.config, session.scheduler
    session.progress.stage("Compiling phases")
    scalars = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
    for plan in plans:
        scheduler.add(
            load_phase(config.phases, plan.name),
            buckets=plan.buckets,
            scalars=scalars,
            warmup_value=plan.value,
            result_bytes=plan.result_bytes,
        )
    scheduler.compile()
    if session.generation is not None:
        session.progress.stage("Planning the refit")
        session.hold("train", "generation")
        connect_refit(
            session.train,
            session.generation,
            dtype=config.policy.precision,
            tied_embeddings=bool(session.inputs.hf_config.get("tie_word_embeddings")),
            kind=_channel_kind(config),
            timeout_s=config.timeouts.start_s,
            channel_timeout_s=config.timeouts.collective_s,
            bucket_bytes=config.refit.bucket_bytes,
            replicate_in_host=config.refit.replicate_in_host,
        )
    session.progress.stage("Warming up")
    if session.generation is not None:
        session.train.call("snapshot_reference")  # for the warm-up; the loop takes the real one
    scheduler.warmup(before=lambda phase: session.hold(*phase.roles))


def _channel_kind(config: Config) -> Literal["gloo", "nccl", "ipc"]:
    """NCCL between GPUs, Gloo without them; between processes that share a GPU, which NCCL refuses, memory they both map."""
    if is_colocated(config):
        return "ipc"
    return "nccl" if gpus_per_worker(config.cluster) else "gloo"


def _resume(session: Session) -> None:
    if session.resumed is None:
        return
    session.progress.stage(f"Resuming from step {session.resumed.state.step}")
    directory = session.resumed.directory / "train"
    session.hold("train", keep_generation_weights=True)
    session.train.call("load_checkpoint", str(directory), timeout_s=session.config.timeouts.checkpoint_s)
    session.state = session.resumed.state
    session.step = session.saved_step = session.state.step


def _options(config: Config) -> SchedulerOptions:
    return SchedulerOptions(
        executor=config.executor,
        fallback=config.fallback,
        max_in_flight=config.executor_cfg.max_in_flight,
        arity=config.executor_cfg.arity,
        result_bytes=config.executor_cfg.result_bytes,
        compile_s=config.timeouts.compile_s,
        warmup_s=config.timeouts.warmup_s,
        replay_s=config.timeouts.replay_s,
        teardown_s=config.timeouts.teardown_s / 2,
    )


def devices_of(config: Config) -> int:
    """GPUs of a run, or its workers where there are none: each worker's own, or shared by the roles in turn."""
    sizes = [layout.world_size for layout in layouts(config).values()]
    return max(sizes) if is_colocated(config) else sum(sizes)


def _process_label(group: WorkerGroup, rank: int) -> str:
    return f"{group.role.name} {rank} ({group.layout.coordinates(rank)})"


def _workers_text(config: Config) -> str:
    groups = layouts(config)
    return " and ".join(f"{layout.world_size} {role} workers ({layout.describe()})" for role, layout in groups.items())
