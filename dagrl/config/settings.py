"""Values that follow from one or two sections of the configuration; `dagrl.config.plan` has what kind of run it is."""

from dagrl.config import Config, GenerationConfig, PolicyConfig
from dagrl.config.run import PHASES
from dagrl.errors import ConfigError

SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA slots can have (`MaxLoRARanks` in its config/lora.py)."""

LEAST_SHARED = 1 / 3
"""Prefixes that save less of a batch's tokens are not shared: attention takes a launch more for them. On an H100 a step with
Qwen3-0.6B's shape takes 1.05 times as long if they save 0.28 of the tokens, and 0.66 times if they save 0.58."""

TOKENIZER_KEY = "policy.tokenizer.name"

GPU_BURST_STEPS = 16
"""Steps of a burst by default: bookkeeping takes a sixteenth, and a sequence computes at most 15 tokens after its end."""


def algorithm_name(config: Config) -> str:
    """Returns the name of the algorithm in records: that of its class, if it is the user's."""
    return config.algorithm.rpartition(":")[2]


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
    """Returns whether refits send LoRA adapters alone."""
    peft = config.policy.peft
    return peft.enabled and peft.refit == "adapters"


def casts_as_packed(config: Config) -> bool:
    """Returns whether refits cast FSDP's float32 weights as they pack them, or engines as they copy them: without copies."""
    generation = config.policy.generation
    plain = generation is not None and generation.vllm_cfg.precision != "fp8"
    return plain and config.policy.backend == "fsdp" and not config.policy.fsdp_cfg.cpu_offload


def burst_steps(config: Config, *, gpus: bool) -> int:
    """Returns the decode steps for each run of vLLM's scheduler.

    1 if a string may end a request, which is found later, and for router replay, which reads the experts of each step.
    """
    generation = generation_config(config)
    strings = generation.stop_strings or config.environment.agent is not None  # whose requests have some too
    if strings or config.policy.router_replay:
        return 1
    return generation.vllm_cfg.num_scheduler_steps or (GPU_BURST_STEPS if gpus else 1)


def recomputes_kv_cache(config: Config) -> bool:
    """Returns whether running requests have their KV cache recomputed after a weight update."""
    return config.grpo.async_grpo.recompute_kv_cache_after_weight_updates


def phase_path(config: Config, name: str) -> str:
    """Returns the import path of a phase that the loops replay: `phases.<name>`, the shipped one, or `name` itself.

    Raises ConfigError for a name that is none of them.
    """
    if name not in PHASES and ":" not in name:
        raise ConfigError(
            f"{name!r} is no phase; expected: {', '.join(PHASES)}, or the import path 'module:function' of your own"
        )
    return config.phases.get(name) or PHASES.get(name, name)


def bucket_widths(policy: PolicyConfig) -> tuple[int, ...]:
    """Returns the token widths that phases are warmed up at, ascending."""
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
    settings = policy.fsdp_cfg if policy.backend == "fsdp" else policy.megatron_cfg
    if not policy.sequence_packing.enabled:
        return "policy.sequence_packing.enabled is false; set it to true"
    if settings.context_parallel_size > 1:
        return f"context_parallel_size is {settings.context_parallel_size}, which splits every sequence; set it to 1"
    if settings.moe_aux_loss_coeff:
        return "the router's loss (moe_aux_loss_coeff) counts the tokens of every sequence; set it to 0"
    return ""


def samples_per_step(config: Config) -> int:
    """Returns the samples of a generated batch: prompts times generations."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def rows_per_sample(config: Config) -> int:
    """Returns the rows of a batch that each sample has: one, or the conversations of an agent, with empty rows for fewer."""
    return config.environment.max_conversations if config.environment.agent is not None else 1


def rows_together(config: Config, group: int) -> int:
    """Returns how many neighbours of a batch should stay on one shard: the rows of a `group`, if they may share a prefix."""
    return 1 if least_shared(config.policy) is None else group


def model_names(config: Config) -> dict[str, str | None]:
    """Returns the names of all models and of the tokenizer, directories or ids on the Hub, by their keys."""
    policy = config.policy
    return {
        "policy.model_name": policy.model_name,
        "critic.model_name": config.critic.model_name,
        **{f"models.{role}.model_name": section.model_name for role, section in config.models.items()},
        TOKENIZER_KEY: policy.tokenizer.name,
    }
