"""The phases each loop replays, and the shapes they are warmed up at.

plan = RunPlan.of(config)
for phase in run_plans(config, plan):
    ...
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagrl.config import Config, Json
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TRAIN, role_config
from dagrl.config.settings import bucket_widths, generation_config, phase_path, rows_per_sample, samples_per_step
from dagrl.data.media import MEDIA
from dagrl.errors import ConfigError
from dagrl.imports import load_attribute
from dagrl.rl.algorithm import columns_by_phase, planned_algorithm
from dagrl.rl.generation import FIRST_QUANTUM, OPTION_BYTES, QUANTUM_SECONDS
from dagrl.rl.preferences import sum_phases
from dagrl.rl.rollout.rollouts import request_slots
from dagrl.rl.routed_experts import ROUTED_EXPERTS, routed_layers
from dagrl.runtime.phase import Phase
from dagrl.runtime.shapes import Bucket, Field, InputSpec, Scalar

KEEP = "keep_columns"  # the phase that gives the train workers what phases of other roles computed
STEP: Mapping[str, Scalar] = {"step": 0}  # scalars of the phases that compute or use log-probabilities
OVERHEAD_BYTES = 1 << 16  # added to the room for results, for what is not an array


@dataclass(frozen=True)
class PhasePlan:
    """A phase by its key in `phases`, and the buckets (sequences and tokens of one shard) it is warmed up at.

    Warm-up batches carry `scalars`. A phase that takes no batch is warmed up with `value`. `fields` are added to the phase's
    own inputs.
    """

    name: str
    buckets: tuple[Bucket, ...] = ()
    result_bytes: int | None = None
    value: int | None = None
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    fields: InputSpec = field(default_factory=dict)


def run_plans(config: Config, plan: RunPlan) -> list[PhasePlan]:
    """Returns the phases of a run."""
    if plan.learns_from == "preferences":
        return preference_plans(config, plan)
    return grpo_plans(config, plan) if plan.generates else sft_plans(config)


def sft_plans(config: Config) -> list[PhasePlan]:
    """Returns the phases of the loop over demonstrations."""
    buckets = train_buckets(config, config.policy.train_global_batch_size)
    return [PhasePlan("demonstration_step", buckets), PhasePlan("evaluate", buckets)]


def preference_plans(config: Config, plan: RunPlan) -> list[PhasePlan]:
    """Returns the phases of the loop over preferences. A pair has two rows."""
    buckets = train_buckets(config, 2 * config.policy.train_global_batch_size)
    sums = 16 * max(bucket.sequences for bucket in buckets) + OVERHEAD_BYTES
    names = sum_phases(planned_algorithm(plan))
    return [*(PhasePlan(name, buckets, sums) for name in names), PhasePlan("preference_step", buckets)]


def grpo_plans(config: Config, plan: RunPlan) -> list[PhasePlan]:
    """Returns the phases of the loop over generated samples, and of the demonstrations before it if there are any."""
    minibatch = train_buckets(config, config.policy.train_global_batch_size * rows_per_sample(config))
    plans = [
        PhasePlan("train_step", minibatch, scalars=STEP),
        *column_plans(config, plan),
        generate_plan(config),
        PhasePlan("refit", value=0),
    ]
    if config.policy.offload_optimizer_for_logprob:
        plans += [PhasePlan("logprob_inference_prep", value=0), PhasePlan("training_prep", value=0)]
    if plan.critic:
        plans += critic_plans(config)
    return [*sft_plans(config), *plans] if config.sft.max_num_steps else plans


def with_records(config: Config, plans: Sequence[PhasePlan], hf_config: Mapping[str, Json]) -> list[PhasePlan]:
    """Adds the record of each token's experts to the phases that make or use it, if `policy.router_replay` is on."""
    if not config.policy.router_replay:
        return list(plans)
    sizes = routed_layers(hf_config)
    users = ("train_step", "logprobs", "reference_logprobs")
    fields = {ROUTED_EXPERTS: Field(sizes.field_dtype)}
    requests = request_slots(generation_config(config).vllm_cfg.max_num_seqs)  # that an engine may return at once
    room = requests * bucket_widths(config.policy)[-1] * sizes.token_bytes
    recorded = [replace(plan, fields=fields) if plan.name in users else plan for plan in plans]
    for number, plan in enumerate(recorded):
        if plan.name == "generate":
            recorded[number] = replace(plan, result_bytes=(plan.result_bytes or 0) + room)
    return recorded


def with_media(config: Config, plans: Sequence[PhasePlan]) -> list[PhasePlan]:
    """Adds the media that tokens stand for to the phases that take tokens, if the run has images."""
    if not config.data.images.enabled:
        return list(plans)
    fields = {MEDIA: Field("int64")}
    takes = {plan.name for plan in plans if "tokens" in (load_phase(config, plan.name).inputs or {})}
    return [replace(plan, fields={**plan.fields, **fields}) if plan.name in takes else plan for plan in plans]


@dataclass(frozen=True)
class ColumnPhases:
    """The phases that compute an algorithm's columns: those on the train workers, which keep them there, and those of other
    roles with the columns that each returns to the driver, from which they go to the train workers (`KEEP`)."""

    train: tuple[str, ...]
    apart: Mapping[str, tuple[str, ...]]


def column_phases(config: Config, plan: RunPlan) -> ColumnPhases:
    """Returns the phases of the algorithm's columns. Raises ConfigError for one whose role the run does not have."""
    train, apart = list[str](), dict[str, tuple[str, ...]]()
    for name, columns in columns_by_phase(planned_algorithm(plan)).items():
        roles = load_phase(config, name).roles
        if roles == (TRAIN,):
            train.append(name)
        elif len(roles) == 1 and roles[0] in config.models:
            apart[name] = columns
        else:
            raise ConfigError(
                f"algorithm: the column {columns[0]!r} of {config.algorithm} is computed by {phase_path(config, name)}, "
                f"which runs on {' and '.join(map(repr, roles))}; expected: one role, train or one of `models`"
                + "".join(f". Add models.{role}.model_name" for role in roles if role not in plan.layouts)
            )
    return ColumnPhases(tuple(train), apart)


def column_plans(config: Config, plan: RunPlan) -> Iterator[PhasePlan]:
    """Yields the phases of the algorithm's columns, each with the buckets of its role."""
    phases, rows = column_phases(config, plan), samples_per_step(config) * rows_per_sample(config)
    buckets = train_buckets(config, rows)
    for name in phases.train:
        yield PhasePlan(name, buckets, scalars=STEP)
    for name, columns in phases.apart.items():
        own = train_buckets(role_config(config, load_phase(config, name).roles[0]), rows)
        yield PhasePlan(name, own, row_bytes(own, len(columns)), scalars=STEP)
    fields = {column: Field("float32") for columns in phases.apart.values() for column in columns}
    if fields:
        yield PhasePlan(KEEP, buckets, scalars=STEP, fields=fields)


def load_phase(config: Config, key: str) -> Phase:
    """Returns the phase `key`: the shipped one, that at the import path `phases.<key>`, or at the path `key`."""
    path = phase_path(config, key)
    phase = load_attribute(path, f"phases.{key}")
    if not isinstance(phase, Phase):
        raise ConfigError(f"phases.{key}: {path!r} is a {type(phase).__name__}; expected: a function decorated with @phase")
    return phase


def critic_plans(config: Config) -> list[PhasePlan]:
    """Returns the phases of a critic."""
    own = role_config(config, CRITIC)
    values = train_buckets(own, samples_per_step(config))
    steps = train_buckets(own, own.policy.train_global_batch_size)
    return [PhasePlan("critic_values", values, row_bytes(values, columns=1)), PhasePlan("critic_step", steps)]


def row_bytes(buckets: tuple[Bucket, ...], columns: int) -> int:
    """Returns the bytes of a result with `columns` float32 values for each token of a shard."""
    return max(bucket.sequences * (4 * columns * bucket.tokens + 8) for bucket in buckets) + OVERHEAD_BYTES


def train_buckets(config: Config, rows: int) -> tuple[Bucket, ...]:
    """Buckets of one train shard for `rows` rows over all shards, at every width of `policy.sequence_buckets`."""
    per_shard = math.ceil(rows / config.policy.train_layout.dp)
    return tuple(Bucket(per_shard, width) for width in bucket_widths(config.policy))


def generate_plan(config: Config) -> PhasePlan:
    """Returns the phase of generation."""
    generation = generation_config(config)
    requests = request_slots(generation.vllm_cfg.max_num_seqs)
    token_bytes = 3 * 8  # id, log-probability, version
    result_bytes = requests * (generation.max_new_tokens * token_bytes + 256) + OVERHEAD_BYTES
    shards, widest = generation.vllm_cfg.layout.dp, bucket_widths(config.policy)[-1]
    scalars: dict[str, Scalar] = {"engine_steps": (FIRST_QUANTUM,) * shards, "seconds": QUANTUM_SECONDS}
    if config.environment.agent is not None:  # room for the options of its requests; every shard gets all of it
        scalars["options"] = " " * (OPTION_BYTES * requests * shards)
    sizes = sorted({min(4, requests), min(32, requests), requests})  # few or many new requests: padding is copied
    buckets = (Bucket(1, 1), *(Bucket(size, widest) for size in sizes))
    return PhasePlan("generate", buckets, result_bytes, scalars=scalars)
