"""Starts a run, and ends it: its directory and records, Ray, the worker groups, and the compiled phases.

`open_session` does everything between `preflight` and the first step, and undoes it at the end, whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from dagrl.checkpoint import Checkpoint, CheckpointStore
from dagrl.cluster import ray_cluster
from dagrl.config import Config
from dagrl.config.settings import generation_config, generation_dtype, is_colocated, layouts
from dagrl.errors import ConfigError
from dagrl.loops.colocated import TRAIN_PARTS, SharedDevices
from dagrl.loops.session import Session, process_label
from dagrl.loops.stop import StopRequestedError, StopSignal, failing_for_good, stop_on_signals
from dagrl.machine import gpus_per_worker
from dagrl.model_init import prepare_model
from dagrl.preflight import Inputs, limit_steps, load_phase, preflight, worker_classes
from dagrl.refit.connect import connect_refit
from dagrl.refit.schedule import LinkSpeeds
from dagrl.scheduler import Scheduler, SchedulerOptions
from dagrl.shapes import Bucket, Scalar
from dagrl.telemetry.annotate import enable_ranges
from dagrl.telemetry.progress import Progress
from dagrl.telemetry.record import RunPaths, RunRecord, kept_from_others, prepare_run_directory
from dagrl.telemetry.timing import PhaseClock
from dagrl.telemetry.trace import DRIVER, TraceWriter
from dagrl.worker_group import GpuBundles, Resources, WorkerGroup, shutdown_groups

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REFERENCE = "reference_policy"  # among the counters of a checkpoint: whether the workers' part has one


@dataclass(frozen=True)
class PhasePlan:
    """A phase of a loop, by its name in `phases.*`, and the shapes it will be replayed at (sequences and tokens a shard).

    Warm-up batches carry `scalars`; `value` is what a phase that takes no batch is warmed up with.
    """

    name: str
    buckets: tuple[Bucket, ...] = ()
    result_bytes: int | None = None
    value: int | None = None
    scalars: Mapping[str, Scalar] = field(default_factory=dict)


@contextmanager
def run_session(config: Config, plans: Sequence[PhasePlan]) -> Iterator[Session]:
    """`open_session` for a whole run: the block takes the steps.

    After it comes what a finished run leaves (`Session.finish`), or a checkpoint if a stop was asked for and checkpoints are
    enabled; in any case the plot and the summary.
    """
    with open_session(config, plans) as session:
        try:
            yield session
            session.finish()
        except StopRequestedError:
            if session.config.checkpointing.enabled:
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
    with ExitStack() as stack:
        stack.enter_context(kept_from_others(RunPaths.of(config)))
        stop = stack.enter_context(stop_on_signals(saves=config.checkpointing.enabled))
        stack.enter_context(failing_for_good(stop))
        progress = stack.enter_context(Progress(config.logger))
        ended = stack.enter_context(ExitStack())
        progress.stage("Preparing the run")
        paths = prepare_run_directory(config)
        config = _resolved(config, inputs, paths)
        store, resumed = _open_checkpoints(config, paths)
        record = stack.enter_context(RunRecord(config, resumed_step=resumed.state.step if resumed else 0))
        trace = stack.enter_context(TraceWriter(paths.trace)) if config.logger.trace_enabled else None
        progress.stage("Starting Ray")
        with stop.at_once():
            stack.enter_context(ray_cluster(config.cluster, teardown_s=config.timeouts.teardown_s))
            stop.listen()
        progress.stage(f"Starting {_workers_text(config)}")
        groups = _start_groups(config, stack, stop)
        scheduler = stack.enter_context(Scheduler(groups, _options(config)))
        train, generation = groups[0], groups[1] if len(groups) > 1 else None
        clock = PhaseClock(trace)
        session = Session(
            config, paths, inputs, train, generation, scheduler, record, trace, progress, clock, store, stop, resumed, ended
        )
        session.shared = _shared_devices(session)
        if trace is not None:
            trace.declare([DRIVER, *(process_label(group, rank) for group in groups for rank in range(len(group.actors)))])
        with stop.at_once():
            _compile(session, plans)
            _resume(session)
        clock.restart()
        stack.callback(session.write_trace)
        yield session


def _resolved(config: Config, inputs: Inputs, paths: RunPaths) -> Config:
    """The configuration as workers get it, with what is known once the data is read and the model is there."""
    config = limit_steps(config, inputs)
    model = prepare_model(config.policy, inputs.tokenizer, paths.init_model)
    return stopping_where_responses_end(naming_for_workers(config, model), inputs.tokenizer)


def _open_checkpoints(config: Config, paths: RunPaths) -> tuple[CheckpointStore, Checkpoint | None]:
    """The run's checkpoints, cleaned up after a crash, and the one to go on from, if there is one and the run resumes."""
    section = config.checkpointing
    store = CheckpointStore(
        paths.checkpoints,
        keep_top_k=section.keep_top_k,
        keep_last_k=section.keep_last_k,
        higher_is_better=section.higher_is_better,
    )
    store.recover(resume=section.resume)
    resumed = store.latest() if section.resume else None
    if resumed is not None:
        check_reference(config, resumed)
    return store, resumed


def naming_for_workers(config: Config, model: Path) -> Config:
    """The configuration with `model` and its tokenizer by absolute paths: workers have working directories of their own."""
    tokenizer = config.policy.tokenizer
    if tokenizer.name is not None:
        tokenizer = tokenizer.model_copy(update={"name": str(Path(tokenizer.name).resolve())})
    policy = config.policy.model_copy(update={"model_name": str(model.resolve()), "tokenizer": tokenizer})
    return config.model_copy(update={"policy": policy})


def stopping_where_responses_end(config: Config, tokenizer: PreTrainedTokenizerFast) -> Config:
    """The configuration with the tokenizer's end of sequence among `policy.generation.stop_token_ids`.

    Demonstrations end with it. Generation workers know the ends of sequence in the model's `config.json` and
    `generation_config.json` alone, which may be others: a base model's with the tokenizer of a chat model.
    """
    generation, end = config.policy.generation, int(cast(int, tokenizer.eos_token_id))
    if generation is None or end in generation.stop_token_ids:
        return config
    generation = generation.model_copy(update={"stop_token_ids": (*generation.stop_token_ids, end)})
    return config.model_copy(update={"policy": config.policy.model_copy(update={"generation": generation})})


def check_reference(config: Config, resumed: Checkpoint) -> None:
    """ConfigError when the run needs a reference policy that a checkpoint of its GRPO phase does not have."""
    penalty = config.loss_fn.reference_policy_kl_penalty
    if penalty and resumed.state.counters.get(REFERENCE) is False:
        raise ConfigError(
            f"loss_fn.reference_policy_kl_penalty is {penalty:g}, but {resumed.directory} has no reference policy, as the "
            "penalty was 0 when it was saved; resume with 0, or start a new run, whose first policy becomes the reference"
        )


def _start_groups(config: Config, stack: ExitStack, stop: StopSignal) -> list[WorkerGroup]:
    """The train group and, where the run has one, the generation group.

    Side by side, as both spend long on imports; on shared GPUs in turn, the train state gone before generation starts.
    """
    places = shared_places(config, stack) if is_colocated(config) else {}
    groups: list[WorkerGroup] = []
    stack.callback(shutdown_groups, groups, config.timeouts.teardown_s / 2)

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

    if is_colocated(config):
        groups.append(start("train"))
        groups[0].call("offload", TRAIN_PARTS)
        groups.append(start("generation"))
    else:
        with ThreadPoolExecutor() as pool:
            starting = [pool.submit(start, role) for role in layouts(config)]
        groups += [future.result() for future in starting if future.exception() is None]
        for future in starting:
            future.result()  # raises what a group could not start for
    if config.logger.nvtx_enabled:
        for group in groups:
            group.call_function(enable_ranges)
    return groups


def shared_places(config: Config, stack: ExitStack) -> dict[str, Resources]:
    """What the workers of each role ask of Ray to lie on the same GPUs, rank by rank; CPUs are shared anyway."""
    if not gpus_per_worker(config.cluster):
        return {}
    sizes = {role: layout.world_size for role, layout in layouts(config).items()}
    bundles = GpuBundles(max(sizes.values()), config.timeouts.start_s)
    stack.callback(bundles.release)
    share = generation_config(config).colocated.train_share
    return {role: Resources(num_gpus=share if role == "train" else 1 - share, bundles=bundles) for role in sizes}


def _shared_devices(session: Session) -> SharedDevices | None:
    """Who has the GPUs when, where train and generation workers share them."""
    config = session.config
    if not is_colocated(config):
        return None
    assert session.generation is not None
    level = generation_config(config).colocated.sleep_level
    return SharedDevices(session.train, session.generation, level, session.clock.measure, config.timeouts.replay)


def _compile(session: Session, plans: Sequence[PhasePlan]) -> None:
    config, scheduler = session.config, session.scheduler
    session.progress.stage("Compiling phases")
    scalars = {"global_valid_tokens": 1.0, "global_valid_sequences": 1.0}
    for plan in plans:
        scheduler.add(
            load_phase(config.phases, plan.name),
            buckets=plan.buckets,
            scalars={**scalars, **plan.scalars},
            token_ids=len(session.inputs.tokenizer),
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
            target_dtype=generation_dtype(config),
            tied_embeddings=bool(session.inputs.hf_config.get("tie_word_embeddings")),
            kind=_channel_kind(config),
            timeout_s=config.timeouts.start_s,
            channel_timeout_s=config.timeouts.collective_s,
            bucket_bytes=config.refit.bucket_bytes,
            replicate_in_host=config.refit.replicate_in_host,
            speeds=LinkSpeeds.of_config(config.refit),
        )
    session.progress.stage("Warming up")
    if any(plan.name == "reference_logprobs" for plan in plans):
        session.train.call("snapshot_reference")  # for the warm-up; the loop takes the real one
    scheduler.warmup(before=lambda phase: session.hold(*phase.roles, keep_generation_weights=True))  # no refit need follow


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
    session.train.call("load_checkpoint", str(directory), deadline=session.config.timeouts.checkpoint)
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
        grace_s=config.timeouts.grace_s,
        teardown_s=config.timeouts.teardown_s / 2,
    )


def _workers_text(config: Config) -> str:
    groups = layouts(config)
    return " and ".join(f"{layout.world_size} {role} workers ({layout.describe()})" for role, layout in groups.items())
