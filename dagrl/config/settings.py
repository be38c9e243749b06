"""Facts that follow from the configuration alone: the algorithm, layouts, widths, who shares what."""

from __future__ import annotations

import math
from typing import Literal, Protocol, cast

from dagrl.config import ALGORITHMS, Config, GenerationConfig, MegatronConfig, PolicyConfig, VllmConfig
from dagrl.config.roles import CRITIC, GENERATION, TEACHER, TRAIN, role_config
from dagrl.errors import ConfigError, LayoutError
from dagrl.imports import load_class, running
from dagrl.runtime.layout import ParallelLayout

SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA slots can have (`MaxLoRARanks` in its config/lora.py)."""

LEAST_SHARED = 1 / 3
"""Prefixes that save less of a batch's tokens are not shared: attention takes a launch more for them. On an H100 a step with
Qwen3-0.6B's shape takes 1.05 times as long if they save 0.28 of the tokens, and 0.66 times if they save 0.58."""

TOKENIZER_KEY = "policy.tokenizer.name"

LearnsFrom = Literal["samples", "demonstrations", "preferences"]
"""The kinds of data that algorithms learn from."""


class AlgorithmTraits(Protocol):
    """What the layout of a run depends on in its algorithm; `dagrl.rl.algorithm` has the whole class."""

    @property
    def learns_from(self) -> LearnsFrom: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def critic(self) -> bool: ...


def load_algorithm(config: Config) -> AlgorithmTraits:
    """Returns the run's algorithm. Raises ConfigError if `algorithm` names no class of one."""
    found = load_class(ALGORITHMS.get(config.algorithm, config.algorithm), "algorithm")
    if not all(hasattr(found, name) for name in ("learns_from", "columns", "advantages", "loss")):
        raise ConfigError(f"algorithm: {config.algorithm} is not an algorithm; derive the class from dagrl.Algorithm")
    with running(config.algorithm, "algorithm"):
        return cast(AlgorithmTraits, found(config))


def algorithm_name(config: Config) -> str:
    """Returns the name of the algorithm in records: that of its class, if it is the user's."""
    return config.algorithm.rpartition(":")[2]


def generates(config: Config) -> bool:
    """Whether the algorithm learns from completions that generation workers make."""
    return load_algorithm(config).learns_from == "samples"


def compares(config: Config) -> bool:
    """Whether the algorithm learns from preferences."""
    return load_algorithm(config).learns_from == "preferences"


def layouts(config: Config) -> dict[str, ParallelLayout]:
    """Returns the layout of each worker group that the run starts."""
    groups = {"train": _layout("policy.megatron_cfg", config.policy.megatron_cfg)}
    if generates(config):
        groups["generation"] = _layout("policy.generation.vllm_cfg", generation_config(config).vllm_cfg)
    for role in model_roles(config):
        groups[role] = _layout(f"{role}.megatron_cfg", role_config(config, role).policy.megatron_cfg)
    return groups


def _layout(key: str, section: MegatronConfig | VllmConfig) -> ParallelLayout:
    try:
        return section.layout
    except LayoutError as error:
        raise LayoutError(f"{key}: {error}") from error


def generation_config(config: Config) -> GenerationConfig:
    """Returns `policy.generation`. Raises ConfigError if it is missing."""
    if config.policy.generation is None:
        raise ConfigError(
            f"policy.generation is missing; algorithm {config.algorithm!r} needs it. Add `policy.generation: {{}}` or more"
        )
    return config.policy.generation


def generation_dtype(config: Config) -> str:
    """Returns the dtype of the generation workers' weights that are not in FP8."""
    precision = generation_config(config).vllm_cfg.precision
    return "bfloat16" if precision == "fp8" else precision or config.policy.precision


def sends_adapters(config: Config) -> bool:
    """Whether refits send LoRA adapters alone."""
    peft = config.policy.megatron_cfg.peft
    return peft.enabled and peft.refit == "adapters" and generates(config)


def keeps_weights(config: Config) -> bool:
    """Whether generation needs weights that no refit sends: base weights under adapters, or those of a learned drafter.

    They go to host memory while it sleeps. Otherwise all weights are dropped, as the next refit brings them.
    """
    return sends_adapters(config) or generation_config(config).vllm_cfg.speculative.model is not None


def has_fp8_kv_cache(config: Config) -> bool:
    """Whether generation's KV cache is in FP8. Train workers then calibrate its scales, and refits send them."""
    generation = config.policy.generation
    return generation is not None and generation.vllm_cfg.kv_cache_dtype == "fp8"


def is_colocated(config: Config) -> bool:
    """Whether train and generation workers share their GPUs (`policy.generation.colocated.enabled`)."""
    generation = config.policy.generation
    return generation is not None and generation.colocated.enabled and generates(config)


def takes_turns(config: Config) -> bool:
    """Whether colocated workers may have to move state off their GPU while the other role works."""
    return is_colocated(config) and generation_config(config).colocated.exchange != "never"


def starts_together(config: Config) -> bool:
    """Whether roles on shared GPUs may take memory at once: it fits, and vLLM need not measure what is free."""
    if not is_colocated(config) or generation_config(config).vllm_cfg.kv_cache_memory_bytes is None:
        return False
    return generation_config(config).colocated.start_together or not takes_turns(config)


def starts_resident(config: Config) -> bool:
    """Whether train states on generation's GPUs stay there while it starts."""
    if not starts_together(config):
        return False
    auto = generation_config(config).colocated.exchange == "auto"
    return not takes_turns(config) or (auto and set(sharing_roles(config)) == {TRAIN, GENERATION})


def warms_up_early(config: Config) -> bool:
    """Whether training is warmed up while generation starts: on other GPUs, or next to it where its state stays.

    If memory may have to be exchanged, a warm-up may run out of it and is then repeated. That needs a single train worker,
    as no peer may wait for it, and no overlapped reductions, which Megatron cannot begin again.
    """
    if not takes_turns(config):
        return not is_colocated(config) or starts_together(config)
    megatron = config.policy.megatron_cfg
    overlaps = megatron.distributed_data_parallel_config.overlap_grad_reduce
    return starts_resident(config) and megatron.layout.world_size == 1 and not overlaps


def device_count(config: Config) -> int:
    """GPUs of a run, or workers if there are no GPUs. Colocated roles share theirs."""
    sizes, sharing = {role: layout.world_size for role, layout in layouts(config).items()}, sharing_roles(config)
    together = max((sizes[role] for role in sharing), default=0)
    return together + sum(size for role, size in sizes.items() if role not in sharing)


def bucket_widths(policy: PolicyConfig) -> tuple[int, ...]:
    """Token widths that phases are warmed up at, ascending."""
    return tuple(sorted(set(policy.sequence_buckets))) or (policy.max_total_sequence_length,)


def width_key(policy: PolicyConfig) -> str:
    """Returns the key that limits the length of a sequence (see `bucket_widths`)."""
    return "policy.sequence_buckets" if policy.sequence_buckets else "policy.max_total_sequence_length"


def least_shared(policy: PolicyConfig) -> float | None:
    """Returns the part of a batch's tokens that shared prefixes must save for packed rows to have them; None: no row has."""
    choice = policy.sequence_packing.shared_prefix
    if choice is False or unshared_reason(policy):
        return None
    return LEAST_SHARED if choice == "auto" else 0.0


def unshared_reason(policy: PolicyConfig) -> str:
    """Returns why packed rows cannot share prefixes, and what to set instead; empty if they can."""
    megatron = policy.megatron_cfg
    if not policy.sequence_packing.enabled:
        return "policy.sequence_packing.enabled is false; set it to true"
    if megatron.context_parallel_size > 1:
        return f"context_parallel_size is {megatron.context_parallel_size}, which splits every sequence; set it to 1"
    if megatron.moe_aux_loss_coeff or megatron.moe_z_loss_coeff:
        return "the router's loss (moe_aux_loss_coeff, moe_z_loss_coeff) counts the tokens of every sequence; set both to 0"
    return ""


def samples_per_step(config: Config) -> int:
    """Returns the samples of a generated batch: prompts times generations."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def rows_per_sample(config: Config) -> int:
    """Returns the rows of a batch that each sample has: one, or the conversations of an agent, with empty rows for fewer."""
    return config.environment.max_conversations if config.environment.agent is not None else 1


def rows_together(config: Config) -> int:
    """Returns how many neighbours of a batch should stay on one shard, as they share a prefix; 1: it does not matter."""
    if least_shared(config.policy) is None:
        return 1
    return 2 if compares(config) else config.grpo.num_generations_per_prompt * rows_per_sample(config)


def uses_reference(config: Config) -> bool:
    """Whether the algorithm reads log-probabilities of a reference policy."""
    return "reference_logprobs" in load_algorithm(config).columns


def uses_critic(config: Config) -> bool:
    """Whether a critic learns next to the policy."""
    return load_algorithm(config).critic


def uses_teacher(config: Config) -> bool:
    """Whether the reference policy is on workers of its own."""
    return config.teacher is not None and uses_reference(config)


def holds_reference(config: Config) -> bool:
    """Whether the train workers hold the reference policy."""
    return config.teacher is None and uses_reference(config)


def model_roles(config: Config) -> tuple[str, ...]:
    """Returns the roles with a model of their own, next to the policy."""
    return (*((CRITIC,) if uses_critic(config) else ()), *((TEACHER,) if uses_teacher(config) else ()))


def model_names(config: Config) -> dict[str, str | None]:
    """Returns the names of all models and of the tokenizer, directories or ids on the Hub, by their keys."""
    policy = config.policy
    names = {"policy.model_name": policy.model_name, "policy.reference_model_name": policy.reference_model_name}
    names |= {f"{role}.model_name": getattr(config, role).model_name for role in model_roles(config)}
    return {**names, TOKENIZER_KEY: policy.tokenizer.name}


def sharing_roles(config: Config) -> tuple[str, ...]:
    """Returns the roles whose workers are on the train workers' GPUs, these among them; empty if there are none."""
    others = [role for role in model_roles(config) if getattr(config, role).colocated]
    others += ["generation"] if is_colocated(config) else []
    return ("train", *others) if others else ()


def recomputes_kv_cache(config: Config) -> bool:
    """Whether running requests have their KV cache recomputed after a weight update."""
    return config.grpo.async_grpo.recompute_kv_cache_after_weight_updates


def optimizer_steps(config: Config) -> int:
    """Returns the optimizer steps of the run, without those of a stage before its algorithm: the schedule restarts there."""
    if compares(config):
        return config.preference.max_num_steps
    if not generates(config):
        return config.sft.max_num_steps
    return config.grpo.max_num_steps * math.ceil(samples_per_step(config) / config.policy.train_global_batch_size)
