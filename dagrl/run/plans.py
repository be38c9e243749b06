"""The phases each loop replays, and the shapes they are warmed up at.

plan = RunPlan.of(config)
for phase in run_plans(config, plan):
    ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagrl.config import Config, Json
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TEACHER, role_config
from dagrl.config.settings import bucket_widths, generation_config, rows_per_sample, samples_per_step
from dagrl.rl.algorithm import COLUMN_PHASES, column_phases, planned_algorithm
from dagrl.rl.generation import FIRST_QUANTUM, OPTION_BYTES, QUANTUM_SECONDS
from dagrl.rl.preferences import sum_phases
from dagrl.rl.rollout.rollouts import request_slots
from dagrl.rl.routed_experts import ROUTED_EXPERTS, routed_layers
from dagrl.runtime.shapes import Bucket, Field, InputSpec, Scalar

REFERENCE_LOGPROBS = COLUMN_PHASES["reference_logprobs"]

STEP: Mapping[str, Scalar] = {"step": 0}
"""Scalars of the phases that compute or use log-probabilities."""

OVERHEAD_BYTES = 1 << 16
"""Added to the room for results, for what is not an array."""


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
    rows = train_buckets(config, samples_per_step(config) * rows_per_sample(config))
    minibatch = train_buckets(config, config.policy.train_global_batch_size * rows_per_sample(config))
    plans = [
        PhasePlan("train_step", minibatch, scalars=STEP),
        *(PhasePlan(name, rows, scalars=STEP) for name in logprob_phases(plan)),
        generate_plan(config),
        PhasePlan("refit", value=0),
    ]
    if config.policy.offload_optimizer_for_logprob:
        plans += [PhasePlan("logprob_inference_prep", value=0), PhasePlan("training_prep", value=0)]
    if plan.reference == TEACHER:
        plans += teacher_plans(config, rows)
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


def logprob_phases(plan: RunPlan) -> tuple[str, ...]:
    """Returns the phases on the train workers whose results the loss uses, so none of a teacher on its own workers."""
    phases = column_phases(planned_algorithm(plan))
    return tuple(name for name in phases if name != REFERENCE_LOGPROBS or plan.reference != TEACHER)


def teacher_plans(config: Config, rows: tuple[Bucket, ...]) -> list[PhasePlan]:
    """Returns the phases of a teacher on workers of its own. `rows`: the buckets in which train workers get its results."""
    teacher = role_config(config, TEACHER)
    own = train_buckets(teacher, samples_per_step(teacher) * rows_per_sample(teacher))
    return [
        PhasePlan("teacher_logprobs", own, row_bytes(own, columns=2)),
        PhasePlan("keep_reference_logprobs", rows, scalars=STEP),
    ]


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
    scalars: dict[str, Scalar] = {"engine_steps": (FIRST_QUANTUM,) * shards, "stream": 1, "seconds": QUANTUM_SECONDS}
    if config.environment.agent is not None:  # room for the options of its requests; every shard gets all of it
        scalars["options"] = " " * (OPTION_BYTES * requests * shards)
    sizes = sorted({min(4, requests), min(32, requests), requests})  # few or many new requests: padding is copied
    buckets = (Bucket(1, 1), *(Bucket(size, widest) for size in sizes))
    return PhasePlan("generate", buckets, result_bytes, scalars=scalars)
