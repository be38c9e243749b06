"""Starts and ends a run: four nested contexts before the first step.

    prepared    checks, run directory, records, handlers of signals; imports of the workers and Ray begin meanwhile
    cluster     Ray is there
    workers     the worker groups, side by side; training may warm up while generation starts
    compiled    phases, refit and warm-up, the state of a checkpoint: the session

Each tears down on exit what it set up, also after a failure.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dagrl.config import CheckpointConfig, Config
from dagrl.config.file import value_text
from dagrl.config.plan import RunPlan
from dagrl.config.roles import GENERATION, TRAIN
from dagrl.config.settings import TOKENIZER_KEY, generation_config, generation_dtype, model_names, sends_adapters
from dagrl.data.media import MediaStore
from dagrl.errors import ClusterError, StopRequestedError
from dagrl.machine import keep_freed_memory
from dagrl.refit import Refit
from dagrl.run.checkpoint_store import Checkpoint, CheckpointStore
from dagrl.run.checkpoints import Checkpoints
from dagrl.run.colocated import DROP_WEIGHTS, KEEP_WEIGHTS, SharedDevices
from dagrl.run.engines import EngineReplacement
from dagrl.run.fleet import Fleet
from dagrl.run.model import Apart, copy_processor, write_random_model
from dagrl.run.plans import PhasePlan, load_phase, run_plans, with_media, with_records
from dagrl.run.preflight import Inputs, limit_steps, preflight
from dagrl.run.replays import Replays
from dagrl.run.resume import SAVED_ROLES, check_steps_left
from dagrl.run.rollout_log import RolloutLog
from dagrl.run.session import LastStep, Recorder, Session, process_label
from dagrl.run.stop import StopSignal, no_restart_after_stop, stop_on_signals
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler, SchedulerOptions
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord, lock_run, prepare_run_directory, put_back_config
from dagrl.telemetry.rollouts import RolloutFiles
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import DRIVER, TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)


@contextmanager
def run_session(config: Config, last_step: LastStep | None = None, fleet: Fleet | None = None) -> Iterator[Session]:
    """Runs the block, which takes the steps up to `last_step` (None: all), in an open session.

    A run that ends writes its last checkpoint and its policy (`Session.finish`). A run that is stopped, or whose Ray
    has ended, writes a checkpoint if checkpoints are enabled. Every run, a failed one too, writes the summary.
    """
    with open_session(config, last_step, fleet) as session:
        try:
            yield session
            session.finish()
        except OSError as error:
            session.checkpoints.explain(error)
            raise
        except (StopRequestedError, ClusterError):
            if session.config.checkpointing.enabled:
                start = time.monotonic()
                session.checkpoints.save_last()
                logger.info("step %d is saved, in %.1f s", session.step, time.monotonic() - start)
            raise
        finally:
            session.recorder.summarize()


@contextmanager
def open_session(config: Config, last_step: LastStep | None = None, fleet: Fleet | None = None) -> Iterator[Session]:
    """Sets up the run; tears it down on exit, also if the block raises.

    `fleet` may keep the workers of a failed session for the next one. Raises a UserError, before any actor starts, for
    everything that can be checked by then.
    """
    with (
        prepared(config, fleet or Fleet()) as run,
        cluster(run),
        workers(run) as started,
        compiled(run, started, last_step) as session,
    ):
        yield session


@dataclass(frozen=True)
class PreparedRun:
    """The parts of a run before any process starts. `put_back` restores the earlier configuration unless the start succeeds;
    callbacks of `at_end` run once Ray has ended."""

    config: Config
    plan: RunPlan
    inputs: Inputs
    phase_plans: Sequence[PhasePlan]
    phases: Mapping[str, Phase]
    fleet: Fleet
    paths: RunPaths
    store: CheckpointStore
    resumed: Checkpoint | None
    record: RunRecord
    trace: TraceWriter | None
    progress: Progress
    stop: StopSignal
    at_end: ExitStack
    put_back: ExitStack


@contextmanager
def prepared(config: Config, fleet: Fleet) -> Iterator[PreparedRun]:
    """Checks the run, locks and writes its directory, and opens its records."""
    with ExitStack() as stack:
        unprepared = stack.enter_context(ExitStack())
        unprepared.callback(fleet.leave, None)
        progress = stack.enter_context(Progress(config.logger))
        if fleet.inputs is None:
            progress.stage("Checking the run")
            fleet.inputs = preflight(config, early=fleet)
        config = fleet.inputs.config.with_keys({"checkpointing.resume": config.checkpointing.resume})
        inputs, paths = replace(fleet.inputs, config=config), RunPaths.of(config)
        stack.enter_context(lock_run(paths))
        stop = stack.enter_context(stop_on_signals(saves=config.checkpointing.enabled))
        stack.enter_context(no_restart_after_stop(stop))
        at_end = stack.enter_context(ExitStack())
        progress.stage("Preparing the run")
        resumes = config.checkpointing.resume and paths.config.exists()
        put_back = stack.enter_context(put_back_config(paths.config)) if resumes else ExitStack()
        kept = config.checkpointing
        limits = {"keep_top_k": kept.keep_top_k, "keep_last_k": kept.keep_last_k}
        store = CheckpointStore(paths.checkpoints, **limits, higher_is_better=kept.higher_is_better)
        if resumes:  # part of a checkpoint may have filled the disk
            store.recover()
        prepare_run_directory(config, inputs.derived)
        for key, reason in inputs.derived.items():
            logger.info("derived %s=%s: %s", key, value_text(config, key), reason)
        config = prepared_config(config, inputs, paths.init_model, fleet.apart)
        plan = RunPlan.of(config)
        phase_plans = with_media(config, with_records(config, run_plans(config, plan), inputs.hf_config))
        media = MediaStore(paths.media, config.data.images)
        media.add(inputs.media)
        media.keep_fullest((row.tokens, row.media) for row in inputs.rows)
        store.recover()
        resumed = store.latest() if kept.resume else None
        if resumed is not None and kept.enabled:
            check_steps_left(config, plan, resumed, paths.final_model)
        step = resumed.state.step if resumed else 0
        run = PreparedRun(
            config=config,
            plan=plan,
            inputs=inputs,
            phase_plans=phase_plans,
            phases=load_phases(config, phase_plans),
            fleet=fleet,
            paths=paths,
            store=store,
            resumed=resumed,
            record=stack.enter_context(RunRecord(config, resumed_step=step, learns_from=plan.learns_from)),
            trace=stack.enter_context(TraceWriter(paths.trace)) if config.logger.trace_enabled else None,
            progress=progress,
            stop=stop,
            at_end=at_end,
            put_back=put_back,
        )
        unprepared.pop_all()  # the cluster's context leaves from here on
        yield run


@contextmanager
def cluster(run: PreparedRun) -> Iterator[None]:
    """Starts Ray or joins its cluster. A failure that a restart may follow leaves Ray and the workers alive."""
    with ExitStack() as stack:
        stack.push(lambda kind, error, trace: run.fleet.leave(error))
        run.progress.stage("Starting Ray")
        with run.stop.at_once():
            run.fleet.join(run.config)
            run.stop.listen()
        yield


@dataclass(frozen=True)
class Workers:
    """The worker groups by role, and the scheduler that they have joined. `warm`: phases that are warmed up already."""

    groups: Mapping[str, WorkerGroup]
    scheduler: Scheduler
    warm: Collection[str]


@contextmanager
def workers(run: PreparedRun) -> Iterator[Workers]:
    """Starts the worker groups as `plan.start` says, or revives those of a failed attempt."""
    sizes = (f"{layout.world_size} {role} workers ({layout.describe()})" for role, layout in run.plan.layouts.items())
    run.progress.stage(f"Starting {' and '.join(sizes)}")
    with Scheduler([], scheduler_options(run.config)) as scheduler:
        warm = set[str]()
        warm_up = partial(_warm_up_early, run, scheduler, warm)
        groups = {group.role.name: group for group in run.fleet.groups(run.config, run.plan, run.stop, warm_up)}
        scheduler.join([group for role, group in groups.items() if role not in scheduler.groups])
        yield Workers(groups, scheduler, warm)


def _warm_up_early(
    run: PreparedRun, scheduler: Scheduler, warm: set[str], groups: Sequence[WorkerGroup], check: Callable[[], None]
) -> None:
    """Compiles and warms up the phases of groups that have started, while others start; adds their names to `warm`.

    Calls `check`, which may raise to give up, before each phase.
    """
    with run.stop.at_once():
        scheduler.join(groups)
        ready = [plan for plan in run.phase_plans if scheduler.groups.keys() >= set(run.phases[plan.name].roles)]
        add_phases(scheduler, run.phases, ready, run.inputs.tokenizer)
        scheduler.compile()
        if run.plan.reference == TRAIN and TRAIN in scheduler.groups:
            scheduler.groups[TRAIN].call("snapshot_reference")  # for the warm-up only
        seconds = scheduler.warmup(before=lambda phase: check())
        _log_warm_up("warm-up while others start", seconds)
        warm.update(seconds)


def _log_warm_up(name: str, seconds: Mapping[str, float]) -> None:
    """Logs how long the warm-up of each phase took."""
    logger.info("%s: %s", name, ", ".join(f"{phase} {spent:.1f} s" for phase, spent in seconds.items()))


@contextmanager
def compiled(run: PreparedRun, started: Workers, last_step: LastStep | None) -> Iterator[Session]:
    """Compiles and warms up the phases, and restores the checkpoint to resume from."""
    config, groups, clock = run.config, started.groups, PhaseClock(run.trace)
    shared = _shared_devices(run, groups, clock)
    replays = Replays(run.phases, started.scheduler, clock, run.plan.devices, shared)
    saved = {role: groups[role] for role in SAVED_ROLES if role in groups}
    with ExitStack() as stack:
        rollouts = _rollout_log(run, groups[TRAIN])
        if rollouts is not None:
            stack.enter_context(rollouts)
        replacement = None
        if run.plan.generates and not run.plan.colocated:
            connect = partial(connect_refit, config, run.plan, groups[TRAIN], groups[GENERATION], run.inputs)
            replacement = EngineReplacement(config, run.fleet, groups[GENERATION], replays, connect)
            stack.callback(replacement.end)
        session = Session(
            config=config,
            plan=run.plan,
            inputs=run.inputs,
            train=groups[TRAIN],
            generation=groups.get(GENERATION),
            replays=replays,
            recorder=Recorder(
                run.paths, run.record, run.progress, run.trace, clock, list(groups.values()), run.at_end, rollouts
            ),
            checkpoints=Checkpoints(config, run.store, saved, replays, run.progress.status, run.resumed),
            stop=run.stop,
            last_step=last_step,
            replacement=replacement,
            after_step=run.fleet.after_step,
        )
        if run.trace is not None:
            labels = (process_label(group, rank) for group in groups.values() for rank in range(len(group.actors)))
            run.trace.declare([DRIVER, *labels])
        with run.stop.at_once():
            _compile(session, run.phase_plans, started.warm)
            if run.resumed is not None:
                run.progress.stage(f"Resuming from step {run.resumed.state.step}")
                session.checkpoints.restore()
        run.put_back.pop_all()  # until here, a run that cannot resume leaves the configuration of its checkpoints
        run.fleet.settle()
        keep_freed_memory()
        gc.freeze()  # full collections between steps skip what the imports and the start made: up to 0.3 s each
        stack.callback(gc.unfreeze)
        clock.restart()
        stack.callback(session.recorder.write_trace)
        stack.callback(run.progress.stage, "Ending the workers and Ray", "shutdown")
        yield session


def _rollout_log(run: PreparedRun, train: WorkerGroup) -> RolloutLog | None:
    most = run.config.logger.rollouts_max_bytes
    if most == 0 or not run.plan.generates:
        return None
    step = run.resumed.state.step if run.resumed else 0
    files = RolloutFiles(run.paths.rollouts, max_bytes=most, resumed_step=step)
    return RolloutLog(files, train, run.inputs.tokenizer, run.config.timeouts.replay)


def load_phases(config: Config, plans: Sequence[PhasePlan]) -> dict[str, Phase]:
    """Resolves the import paths of the planned phases, by their key in `phases`, and adds the plans' fields."""
    phases = {plan.name: load_phase(config, plan.name) for plan in plans}
    more = {plan.name: {**(phases[plan.name].inputs or {}), **plan.fields} for plan in plans if plan.fields}
    return {name: replace(phase, inputs=more[name]) if name in more else phase for name, phase in phases.items()}


def add_phases(
    scheduler: Scheduler, phases: Mapping[str, Phase], plans: Sequence[PhasePlan], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Tells the scheduler the shapes of the planned phases."""
    for plan in plans:
        scheduler.add(
            phases[plan.name],
            buckets=plan.buckets,
            scalars={"global_valid_tokens": 1.0, "global_valid_sequences": 1.0, **plan.scalars},
            token_ids=len(tokenizer),
            warmup_value=plan.value,
            result_bytes=plan.result_bytes,
        )


def in_scratch(config: Config, directory: str) -> Config:
    """Returns the configuration of a run in a directory that is thrown away: without checkpoints, samples and trackers."""
    silent = {f"logger.{name}_enabled": False for name in ("tensorboard", "wandb", "trace")}
    checkpoints = CheckpointConfig(enabled=False, export_hf=False)
    kept = {"output_dir": directory, "on_failure": "stop", "checkpointing": checkpoints}
    return config.with_keys({**kept, "logger.rollouts_max_bytes": 0, **silent})


def prepared_config(config: Config, inputs: Inputs, init_model: Path, apart: Apart = partial) -> Config:
    """Returns the configuration that workers get: step limits and absolute paths are filled in.

    A model from a seed is written to `init_model`. Engines that look for stop strings get a tokenizer next to it that reads
    texts as this one does: vLLM would make one of the class that the model's files name.
    """
    config, init, generation = limit_steps(config, inputs), config.policy.random_init, config.policy.generation
    if init is not None:
        name = config.policy.tokenizer.name
        source = Path(name) if name is not None else None
        written = apart(write_random_model, init, inputs.tokenizer, init_model, source)()
        if written:
            logger.info(written)
    elif generation is not None and (generation.stop_strings or config.environment.agent is not None):
        directory = init_model.with_name("tokenizer")
        inputs.tokenizer.save_pretrained(directory)
        copy_processor(Path(config.policy.tokenizer.name or str(config.policy.model_name)), directory)
        config = config.with_keys({TOKENIZER_KEY: str(directory)})
    model = init_model if init is not None else Path(str(config.policy.model_name))
    return with_absolute_paths(config, model)


def with_absolute_paths(config: Config, model: Path) -> Config:
    """Makes the paths of `model`, its tokenizer and adapters absolute: workers run in other directories."""
    names = {**model_names(config), "policy.peft.adapter_path": config.policy.peft.adapter_path}
    names["policy.model_name"] = str(model)
    return config.with_keys({key: str(Path(name).resolve()) for key, name in names.items() if name is not None})


def _shared_devices(run: PreparedRun, groups: Mapping[str, WorkerGroup], clock: PhaseClock) -> SharedDevices | None:
    """Returns the memory exchange between the groups that share GPUs with generation, if there are any."""
    if not run.plan.colocated:
        return None
    states = {role: groups[role] for role in run.plan.sharing if role != GENERATION}
    level = KEEP_WEIGHTS if sends_adapters(run.config) else DROP_WEIGHTS  # all others come with the next refit
    exchange, deadline = generation_config(run.config).colocated.exchange, run.config.timeouts.replay
    return SharedDevices(
        states, groups[GENERATION], level, clock.measure, deadline, exchange, resident=run.plan.start.resident
    )


def _compile(session: Session, plans: Sequence[PhasePlan], warm: Collection[str]) -> None:
    """Compiles phases and warms them up, except those that are `warm`."""
    config, replays, scheduler = session.config, session.replays, session.replays.scheduler
    progress, phases = session.recorder.progress, session.replays.phases
    progress.stage("Compiling phases")
    compiled = scheduler.graphs()
    left = [plan for plan in plans if phases[plan.name].name not in compiled]
    needs_reference = session.plan.reference == TRAIN and any(phases[plan.name].roles == (TRAIN,) for plan in left)
    add_phases(scheduler, phases, left, session.inputs.tokenizer)
    scheduler.compile()
    if session.generation is not None:
        progress.stage("Planning the refit")
        replays.hold("train", "generation")
        connect_refit(config, session.plan, session.train, session.generation, session.inputs)
    progress.stage("Warming up", "warm-up")
    if needs_reference:
        session.train.call("snapshot_reference")  # for the warm-up only
    hold = partial(replays.hold, keep_generation_weights=True)  # no refit follows
    if replays.shared is not None:
        replays.shared.measure_turns()
    names = [name for plan in plans if (name := phases[plan.name].name) not in warm]
    _log_warm_up("warm-up", scheduler.warmup(before=lambda phase: hold(*phase.roles), only=names))
    if replays.shared is not None:
        replays.shared.settle()


def connect_refit(config: Config, plan: RunPlan, train: WorkerGroup, generation: WorkerGroup, inputs: Inputs) -> None:
    """Plans the refit and connects the workers for it; again after workers were replaced."""
    Refit.connect(
        train,
        generation,
        dtype=config.policy.precision,
        target_dtype=generation_dtype(config),
        tied_embeddings=bool(inputs.hf_config.get("tie_word_embeddings")),
        kind="ipc" if plan.colocated else None,
        verify=config.refit.verify,
        timeout_s=config.timeouts.collective_s,
        connect_timeout_s=config.timeouts.start_s,
    )


def scheduler_options(config: Config) -> SchedulerOptions:
    """Returns how the scheduler of a run executes phases."""
    return SchedulerOptions(
        executor=config.executor,
        fallback=config.fallback,
        engine=config.executor_cfg.engine,
        compile_s=config.timeouts.compile_s,
        warmup_s=config.timeouts.warmup_s,
        replay_s=config.timeouts.replay_s,
        hang_factor=config.timeouts.hang_factor,
        hang_floor_s=config.timeouts.hang_floor_s,
        grace_s=config.timeouts.grace_s,
        teardown_s=config.timeouts.teardown_s / 2,
        section="timeouts",
    )
