"""Starts and ends a run: its directory and records, Ray, the worker groups, and the compiled phases.

`open_session` does everything between `preflight` and the first step, and undoes it at the end, also after a failure.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dagrl.config import Config
from dagrl.config.file import value_text
from dagrl.config.roles import GENERATION, TRAIN
from dagrl.config.settings import (
    device_count,
    generates,
    generation_config,
    generation_dtype,
    holds_reference,
    is_colocated,
    keeps_weights,
    layouts,
    model_names,
    sharing_roles,
    starts_resident,
)
from dagrl.errors import ClusterError, StopRequestedError
from dagrl.refit import Refit
from dagrl.run.checkpoint_store import Checkpoint, CheckpointStore
from dagrl.run.checkpoints import Checkpoints
from dagrl.run.colocated import DROP_WEIGHTS, KEEP_WEIGHTS, SharedDevices
from dagrl.run.encryption import tls_files
from dagrl.run.engine_replacement import EngineReplacement
from dagrl.run.fleet import Fleet
from dagrl.run.model import write_random_model
from dagrl.run.plans import PhasePlan, with_records
from dagrl.run.preflight import Inputs, limit_steps, load_phase, preflight
from dagrl.run.recorder import Recorder, process_label
from dagrl.run.replays import Replays
from dagrl.run.resume import SAVED_ROLES
from dagrl.run.rollout_log import RolloutLog
from dagrl.run.session import LastStep, Session
from dagrl.run.stop import no_restart_after_stop, stop_on_signals
from dagrl.run.warm_up import EarlyWarmUp, add_phases, log_warm_up
from dagrl.runtime.options import SchedulerOptions
from dagrl.runtime.phase import Phase
from dagrl.runtime.schedule import Scheduler
from dagrl.runtime.worker_group import WorkerGroup
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord, lock_run, prepare_run_directory, put_back_config
from dagrl.telemetry.rollouts import RolloutFiles
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import DRIVER, TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Plans = Callable[[Config], Sequence[PhasePlan]]
"""Returns the phases of a loop for a configuration in which every key has its value."""


@contextmanager
def run_session(
    config: Config, plans: Plans, last_step: LastStep | None = None, fleet: Fleet | None = None
) -> Iterator[Session]:
    """Runs the block, which takes the steps up to `last_step` (None: all), in an open session.

    A run that ends writes its last checkpoint and its policy (`Session.finish`). A run that is stopped, or whose Ray
    has ended, writes a checkpoint if checkpoints are enabled. Every run, a failed one too, writes the summary.
    """
    with open_session(config, plans, last_step, fleet) as session:
        try:
            yield session
            session.finish()
        except (StopRequestedError, ClusterError):
            if session.config.checkpointing.enabled:
                start = time.monotonic()
                session.checkpoints.save_last()
                logger.info("step %d is saved, in %.1f s", session.step, time.monotonic() - start)
            raise
        finally:
            session.recorder.summarize()


@contextmanager
def open_session(
    config: Config, plan: Plans, last_step: LastStep | None = None, fleet: Fleet | None = None
) -> Iterator[Session]:
    """Does everything before the first step, and undoes it after the block, also if the block raises.

    `plan` gets the configuration with derived values. `fleet` may keep the workers of a failed session for the next one.
    Raises a UserError, before any actor starts, for everything that can be checked by then.
    """
    fleet = fleet or Fleet()
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(config.logger))
        if fleet.inputs is None:
            progress.stage("Checking the run")
            fleet.inputs = preflight(config)
        config = fleet.inputs.config.with_keys({"checkpointing.resume": config.checkpointing.resume})
        inputs = replace(fleet.inputs, config=config)
        stack.enter_context(lock_run(RunPaths.of(config)))
        stop = stack.enter_context(stop_on_signals(saves=config.checkpointing.enabled))
        stack.enter_context(no_restart_after_stop(stop))
        at_end = stack.enter_context(ExitStack())
        stack.push(lambda kind, error, trace: fleet.leave(error))
        plans = plan(config)
        progress.stage("Preparing the run")
        earlier = RunPaths.of(config).config
        resumes = config.checkpointing.resume and earlier.exists()
        put_back = stack.enter_context(put_back_config(earlier)) if resumes else ExitStack()
        paths = prepare_run_directory(config, inputs.derived)
        for key, reason in inputs.derived.items():
            logger.info("derived %s=%s: %s", key, value_text(config, key), reason)
        config = prepared_config(config, inputs, paths.init_model)
        store, resumed = _open_checkpoints(config, paths)
        record = stack.enter_context(RunRecord(config, resumed_step=resumed.state.step if resumed else 0))
        trace = stack.enter_context(TraceWriter(paths.trace)) if config.logger.trace_enabled else None
        progress.stage("Starting Ray")
        with stop.at_once():
            fleet.join(config)
            stop.listen()
        plans = with_records(config, plans, inputs.hf_config)
        phases = load_phases(config, plans)
        roles = {role for phase in phases.values() for role in phase.roles}
        sizes = {role: layout for role, layout in layouts(config).items() if role in roles}
        workers = (f"{layout.world_size} {role} workers ({layout.describe()})" for role, layout in sizes.items())
        progress.stage(f"Starting {' and '.join(workers)}")
        scheduler = stack.enter_context(Scheduler([], scheduler_options(config)))
        early = EarlyWarmUp(config, inputs, plans, phases, scheduler, stop)
        groups = fleet.groups(config, roles, stop, early)
        scheduler.join([group for group in groups if group.role.name not in scheduler.groups])
        by_role = {group.role.name: group for group in groups}
        train, generation = by_role["train"], by_role.get("generation")
        clock = PhaseClock(trace)
        shared = _shared_devices(config, by_role, clock)
        replays = Replays(phases, scheduler, clock, device_count(config), shared)
        saved = {role: by_role[role] for role in SAVED_ROLES if role in by_role}
        rollouts = _rollout_log(config, inputs, paths, train, resumed, trace)
        if rollouts is not None:
            stack.enter_context(rollouts)
        checkpoints = Checkpoints(config, store, saved, replays, progress.status, resumed)
        replacement = _replacement(config, fleet, inputs, by_role, replays, stack)
        session = Session(
            config=config,
            inputs=inputs,
            train=train,
            generation=generation,
            replays=replays,
            recorder=Recorder(paths, record, progress, trace, clock, groups, at_end, rollouts),
            checkpoints=checkpoints,
            stop=stop,
            last_step=last_step,
            replacement=replacement,
            after_step=fleet.after_step,
        )
        if trace is not None:
            trace.declare([DRIVER, *(process_label(group, rank) for group in groups for rank in range(len(group.actors)))])
        with stop.at_once():
            _compile(session, plans, early.done)
            if resumed is not None:
                progress.stage(f"Resuming from step {resumed.state.step}")
                session.checkpoints.restore()
        put_back.pop_all()  # until here, a run that cannot resume leaves the configuration of its checkpoints
        fleet.settle()
        gc.freeze()  # full collections between steps skip what the imports and the start made: up to 0.3 s each
        stack.callback(gc.unfreeze)
        clock.restart()
        stack.callback(session.recorder.write_trace)
        stack.callback(progress.stage, "Ending the workers and Ray", "shutdown")
        yield session


def _rollout_log(
    config: Config,
    inputs: Inputs,
    paths: RunPaths,
    train: WorkerGroup,
    resumed: Checkpoint | None,
    trace: TraceWriter | None,
) -> RolloutLog | None:
    if config.logger.rollouts_max_bytes == 0 or not generates(config):
        return None
    step = resumed.state.step if resumed else 0
    files = RolloutFiles(paths.rollouts, max_bytes=config.logger.rollouts_max_bytes, resumed_step=step)
    return RolloutLog(files, train, inputs.tokenizer, config.timeouts.replay, trace)


def load_phases(config: Config, plans: Sequence[PhasePlan]) -> dict[str, Phase]:
    """Resolves the import paths of the planned phases, by their key in `phases`, and adds the plans' fields."""
    phases = {plan.name: load_phase(config.phases, plan.name) for plan in plans}
    more = {plan.name: {**(phases[plan.name].inputs or {}), **plan.fields} for plan in plans if plan.fields}
    return {name: replace(phase, inputs=more[name]) if name in more else phase for name, phase in phases.items()}


def prepared_config(config: Config, inputs: Inputs, init_model: Path) -> Config:
    """Returns the configuration that workers get: step limits, absolute paths and stop tokens are filled in.

    A model from a seed is written to `init_model`.
    """
    config, init = limit_steps(config, inputs), config.policy.random_init
    if init is not None:
        write_random_model(init, inputs.tokenizer, init_model)
    model = init_model if init is not None else Path(str(config.policy.model_name))
    return with_end_of_sequence(with_absolute_paths(config, model), inputs.tokenizer)


def _open_checkpoints(config: Config, paths: RunPaths) -> tuple[CheckpointStore, Checkpoint | None]:
    """The checkpoints of the run, cleaned up after a crash, and the one to resume from, if any."""
    section = config.checkpointing
    store = CheckpointStore(
        paths.checkpoints,
        keep_top_k=section.keep_top_k,
        keep_last_k=section.keep_last_k,
        higher_is_better=section.higher_is_better,
    )
    store.recover(resume=section.resume)
    return store, store.latest() if section.resume else None


def with_absolute_paths(config: Config, model: Path) -> Config:
    """Makes the paths of `model`, its tokenizer and adapters absolute: workers run in other directories."""
    names = {**model_names(config), "policy.megatron_cfg.peft.adapter_path": config.policy.megatron_cfg.peft.adapter_path}
    names["policy.model_name"] = str(model)
    return config.with_keys({key: str(Path(name).resolve()) for key, name in names.items() if name is not None})


def with_end_of_sequence(config: Config, tokenizer: PreTrainedTokenizerFast) -> Config:
    """Adds the tokenizer's end-of-sequence token, which ends demonstrations, to `policy.generation.stop_token_ids`.

    Generation workers read end tokens only from the model's `config.json` and `generation_config.json`. These can differ, as
    for a base model with the tokenizer of a chat model.
    """
    generation, end = config.policy.generation, int(cast(int, tokenizer.eos_token_id))
    if generation is None or end in generation.stop_token_ids:
        return config
    return config.with_keys({"policy.generation.stop_token_ids": (*generation.stop_token_ids, end)})


def _shared_devices(config: Config, groups: Mapping[str, WorkerGroup], clock: PhaseClock) -> SharedDevices | None:
    """The memory exchange between the groups that share GPUs with generation, if there are any."""
    if not is_colocated(config) or GENERATION not in groups:
        return None
    states = {role: groups[role] for role in sharing_roles(config) if role in groups and role != GENERATION}
    exchange, level = generation_config(config).colocated.exchange, KEEP_WEIGHTS if keeps_weights(config) else DROP_WEIGHTS
    resident = starts_resident(config) or exchange == "never"
    return SharedDevices(states, groups[GENERATION], level, clock.measure, config.timeouts.replay, exchange, resident)


def _replacement(
    config: Config,
    fleet: Fleet,
    inputs: Inputs,
    groups: Mapping[str, WorkerGroup],
    replays: Replays,
    stack: ExitStack,
) -> EngineReplacement | None:
    """What replaces generation engines that fail; none where they share GPUs with training."""
    generation = groups.get("generation")
    if generation is None or is_colocated(config):
        return None
    plan = partial(connect_refit, config, groups["train"], generation, inputs)
    replacement = EngineReplacement(config, fleet, generation, replays, plan)
    stack.callback(replacement.end)
    return replacement


def _compile(session: Session, plans: Sequence[PhasePlan], warm: Collection[str]) -> None:
    """Compiles phases and warms them up, except those that are `warm`, and still are when roles take turns."""
    config, replays, scheduler = session.config, session.replays, session.replays.scheduler
    progress, phases = session.recorder.progress, session.replays.phases
    progress.stage("Compiling phases")
    compiled = scheduler.graphs()
    left = [plan for plan in plans if phases[plan.name].name not in compiled]
    needs_reference = holds_reference(config) and any(phases[plan.name].roles == (TRAIN,) for plan in left)
    add_phases(scheduler, phases, left, session.inputs.tokenizer)
    scheduler.compile()
    if session.generation is not None:
        progress.stage("Planning the refit")
        replays.hold("train", "generation")
        connect_refit(config, session.train, session.generation, session.inputs)
    progress.stage("Warming up", "warm-up")
    if needs_reference:
        session.train.call("snapshot_reference")  # for the warm-up only
    hold = partial(replays.hold, keep_generation_weights=True)  # no refit follows
    if replays.shared is not None and replays.shared.measure_turns(trained=bool(warm)) and warm:
        logger.info("training is warmed up again while generation sleeps: there is no ample room for both")
        warm = ()
    names = [name for plan in plans if (name := phases[plan.name].name) not in warm]
    log_warm_up("warm-up", scheduler.warmup(before=lambda phase: hold(*phase.roles), only=names))
    if replays.shared is not None:
        replays.shared.settle()


def connect_refit(config: Config, train: WorkerGroup, generation: WorkerGroup, inputs: Inputs) -> None:
    """Plans the refit and connects the workers for it; again after workers were replaced."""
    Refit.connect(
        train,
        generation,
        dtype=config.policy.precision,
        target_dtype=generation_dtype(config),
        tied_embeddings=bool(inputs.hf_config.get("tie_word_embeddings")),
        kind="ipc" if is_colocated(config) else None,
        verify=config.refit.verify,
        record=config.refit.cuda_graph,
        delta=config.refit.delta,
        timeout_s=config.timeouts.collective_s,
        connect_timeout_s=config.timeouts.start_s,
        bucket_bytes=config.refit.bucket_bytes,
    )


def scheduler_options(config: Config) -> SchedulerOptions:
    """How the scheduler of a run executes phases."""
    return SchedulerOptions(
        executor=config.executor,
        fallback=config.fallback,
        engine=config.executor_cfg.engine,
        tls=tls_files(config.cluster),
        compile_s=config.timeouts.compile_s,
        warmup_s=config.timeouts.warmup_s,
        replay_s=config.timeouts.replay_s,
        hang_factor=config.timeouts.hang_factor,
        hang_floor_s=config.timeouts.hang_floor_s,
        grace_s=config.timeouts.grace_s,
        teardown_s=config.timeouts.teardown_s / 2,
    )
