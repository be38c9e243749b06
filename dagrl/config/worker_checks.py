"""Checks of how train and generation workers share GPUs, send weights and compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from packaging.version import Version

from dagrl.config import Config, PolicyConfig
from dagrl.config.roles import role_config
from dagrl.config.settings import (
    SLOT_RANKS,
    generates,
    generation_config,
    has_fp8_kv_cache,
    is_colocated,
    layouts,
    model_roles,
    sends_adapters,
    takes_turns,
    unshared_reason,
    uses_reference,
)
from dagrl.errors import ConfigError, LayoutError, UserError

OLDEST_ENGINE = "2.20"
"""Version of Transformer Engine from which on it has the functions in use."""

HOPPER = 9
"""The major compute capability of the GPUs on which its kernels were measured, and its FP8 blocks are native."""

Mistakes = Mapping[str, bool]
"""What is said of each mistake that a configuration may have, and whether it has it."""


def refuse(mistakes: Mistakes, error: type[UserError] = ConfigError) -> None:
    """Raises the first mistake that is made."""
    for mistake, made in mistakes.items():
        if made:
            raise error(mistake)


def colocation_mistakes(config: Config) -> Mistakes:
    """What needs the train and generation workers of shared GPUs at once."""
    kept = config.policy.reference_weights == "device" and uses_reference(config)
    return {
        "policy.generation.colocated.enabled and grpo.async_grpo.enabled are both true, but colocated workers take turns on "
        "their GPUs; set one to false": is_colocated(config) and config.grpo.async_grpo.enabled,
        "policy.generation.colocated.enabled is true, but policy.reference_weights is 'device', which keeps the reference "
        "policy on the GPU during generation; set policy.reference_weights to host, or "
        "policy.generation.colocated.exchange to never": takes_turns(config) and kept,
    }


def adapter_mistakes(config: Config) -> Mistakes:
    """What vLLM's LoRA slots cannot hold of a refit of adapters alone."""
    if not sends_adapters(config):
        return {}
    peft, generation = config.policy.megatron_cfg.peft, generation_config(config)
    vllm = generation.vllm_cfg
    mistakes = {
        f"megatron_cfg.peft.dim is {peft.dim}, but vLLM's LoRA slots have at most {SLOT_RANKS[-1]}": peft.dim
        > SLOT_RANKS[-1],
        "generation.vllm_cfg.precision is fp8, but vLLM would quantize the base weights that stay as loaded": (
            vllm.precision == "fp8"
        ),
        "generation.vllm_cfg.kv_cache_dtype is fp8, whose scales come with the weights": has_fp8_kv_cache(config),
    }
    advice = "change it, or set policy.megatron_cfg.peft.refit=merged"
    return {f"policy.{mistake}; {advice}": made for mistake, made in mistakes.items()}


def speculation_mistakes(config: Config) -> Mistakes:
    """What a drafter lacks, and what else decides where a sequence ends or what is recorded."""
    if not generates(config):
        return {}
    generation = generation_config(config)
    vllm, drafter, key = generation.vllm_cfg, generation.vllm_cfg.speculative, "policy.generation.vllm_cfg.speculative"
    if drafter.method is None:
        return {}
    learned, found = drafter.method != "ngram", f"{key}.method is {drafter.method}"
    mistakes = {
        f"and {key}.model is not set; set it to the drafter's checkpoint": learned and drafter.model is None,
        f"and {key}.model is set, which an n-gram drafter lacks; remove it": not learned and drafter.model is not None,
        f"and prompt_lookup_min = {drafter.prompt_lookup_min} is above prompt_lookup_max = {drafter.prompt_lookup_max}; "
        "lower it": not learned and drafter.prompt_lookup_min > drafter.prompt_lookup_max,
        "and policy.generation.vllm_cfg.num_scheduler_steps is above 1, but every step has drafts of its own; set it to 1": (
            (vllm.num_scheduler_steps or 1) > 1
        ),
        "but stop_strings, an agent, policy.router_replay and policy.megatron_cfg.peft.refit=adapters work one token at a "
        f"time; set {key}.method to null, or do without them": bool(generation.stop_strings)
        or config.environment.agent is not None
        or config.policy.router_replay
        or sends_adapters(config),
    }
    return {f"{found}, {mistake}": made for mistake, made in mistakes.items()}


def delta_mistakes(config: Config) -> Mistakes:
    """What a refit of changed weights alone cannot be combined with."""
    on = config.refit.delta != "off"
    return {
        "refit.delta is lossless and policy.generation.colocated.enabled is true: copies inside a GPU are faster than "
        "comparing, and the kept copy would take its memory. Set refit.delta=off": on and is_colocated(config),
        "refit.delta is lossless and refit.cuda_graph is true, but a graph sends the same bytes each time; set "
        "refit.cuda_graph=auto, or refit.delta=off": on and config.refit.cuda_graph is True,
    }


def check_shared_gpus(config: Config) -> None:
    """Checks that workers of one group have a GPU each: NCCL cannot connect two processes on one GPU."""
    share = config.cluster.gpus_per_worker
    for role, layout in layouts(config).items() if share is not None and 0 < share < 1 else ():
        if layout.world_size > 1:
            raise LayoutError(
                f"cluster.gpus_per_worker is {share:g}, so several of the {layout.world_size} {role} workers "
                f"({layout.describe()}) share a GPU, where NCCL cannot connect them; set it to 1, or use one {role} worker"
            )


def communication_mistakes(config: Config) -> Mistakes:
    """What keeps the requested communication from overlapping computation."""
    megatron = config.policy.megatron_cfg
    ddp, key = megatron.distributed_data_parallel_config, "policy.megatron_cfg.distributed_data_parallel_config"
    may_gather = ddp.overlap_grad_reduce and megatron.optimizer.use_distributed_optimizer
    return {
        f"{key}.overlap_param_gather is true, which needs {key}.overlap_grad_reduce=true and "
        "policy.megatron_cfg.optimizer.use_distributed_optimizer=true; set both, or set overlap_param_gather=false": (
            ddp.overlap_param_gather and not may_gather
        ),
        f"{key}.overlap_grad_reduce and policy.megatron_cfg.cuda_graphs are both true: a replayed backward pass cannot "
        "start reductions. Set one to false": ddp.overlap_grad_reduce and megatron.cuda_graphs,
    }


def cuda_graph_mistakes(config: Config) -> Mistakes:
    """What keeps a microbatch's forward and backward pass from being captured as CUDA graphs."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.cuda_graphs:
        return {}
    varlen = policy.sequence_packing.enabled or megatron.layout.cp > 1
    mistakes = {
        f", but pipeline_model_parallel_size is {megatron.layout.pp}: a pipeline has several microbatches in flight, a "
        "graph replays one. Set cuda_graphs=false, or pipeline_model_parallel_size=1": megatron.layout.pp > 1,
        ", and so is activation_checkpointing, which reads the random generator's state: a graph cannot capture that. Set "
        "one to false": megatron.activation_checkpointing,
        ", and so is policy.generation.colocated.enabled: weights that leave the GPU return at other addresses, and graphs "
        "would have to be captured again. Set policy.generation.colocated.exchange=never, or cuda_graphs=false": (
            takes_turns(config)
        ),
        f" and policy.precision is {policy.precision!r}, but with sequence packing or context parallelism attention is one "
        "kernel in bfloat16 only; set policy.precision=bfloat16, or cuda_graphs=false": (
            varlen and policy.precision != "bfloat16"
        ),
    }
    return {f"policy.megatron_cfg.cuda_graphs is true{mistake}": made for mistake, made in mistakes.items()}


def prefix_mistakes(config: Config) -> Mistakes:
    """What keeps packed rows that must share prefixes from it."""
    policies = {role: role_config(config, role).policy for role in ("train", *model_roles(config))}
    reasons = {role: unshared_reason(one) for role, one in policies.items() if one.sequence_packing.shared_prefix is True}
    return {
        f"sequence_packing.shared_prefix is true for {role} workers, but {reason}, or set shared_prefix=auto": bool(reason)
        for role, reason in reasons.items()
    }


def engine_mistakes(config: Config) -> Mistakes:
    """What keeps Transformer Engine from computing what the configuration needs it for."""
    reasons = [reason for reason, made in _engine_conflicts(config.policy).items() if made]
    return {need.format(reason=reason): True for need in _engine_needs(config.policy) for reason in reasons}


def check_engine(policy: PolicyConfig, has_gpu: bool) -> str:
    """Returns why layers cannot compute with Transformer Engine in this environment; empty if they can.

    Raises ConfigError if the configuration needs it.
    """
    found = engine_version()
    reasons = {
        "there is no GPU": not has_gpu,
        **_engine_conflicts(policy),
        f"it is not installed: install transformer_engine[pytorch]>={OLDEST_ENGINE}": found is None,
        f"version {found} is installed: {OLDEST_ENGINE} is the oldest with the functions in use": (
            found is not None and Version(found) < Version(OLDEST_ENGINE)
        ),
    }
    reason, needs = next((reason for reason, holds in reasons.items() if holds), ""), _engine_needs(policy)
    if reason and needs:
        raise ConfigError(needs[0].format(reason=reason))
    return reason


def _engine_needs(policy: PolicyConfig) -> Sequence[str]:
    """Returns errors of a configuration that needs Transformer Engine, with a place for the reason why it cannot be used."""
    megatron = policy.megatron_cfg
    blockwise = megatron.fp8_cfg.enabled and megatron.fp8_cfg.fp8_recipe == "blockwise"
    needs = {
        ("transformer_engine", "always", "auto"): megatron.transformer_engine == "always",
        ("fp8_cfg.fp8_recipe", "blockwise", "tensorwise"): blockwise,
    }
    return [
        f"policy.megatron_cfg.{key} is {value}, which needs Transformer Engine, but {{reason}}. Otherwise set {key}={other}"
        for (key, value, other), made in needs.items()
        if made
    ]


def engine_version() -> str | None:
    """Returns the version of Transformer Engine in this environment, None if it is not installed."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def _engine_conflicts(policy: PolicyConfig) -> Mistakes:
    return {
        f"policy.precision is {policy.precision}, and the kernels in use are for bfloat16": policy.precision != "bfloat16",
        "policy.deterministic is true, and not all of its kernels are deterministic": policy.deterministic,
    }


def check_float8(recipe: str, gpu: str, capability: tuple[int, int]) -> None:
    """Checks that a GPU, by its name and compute capability, multiplies FP8 matrices that are scaled by `recipe`."""
    found = f"{gpu} has {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        raise ConfigError(
            "policy.megatron_cfg.fp8_cfg.enabled is true, which needs GPUs of compute capability 8.9 or more (Ada, Hopper, "
            f"Blackwell); {found}. Set it to false, or use other GPUs"
        )
    if recipe == "blockwise" and capability[0] != HOPPER:
        raise ConfigError(
            "policy.megatron_cfg.fp8_cfg.fp8_recipe is blockwise, which needs GPUs of compute capability 9.0 (Hopper); "
            f"{found}. Set it to tensorwise, or use other GPUs"
        )


def expert_mistakes(config: Config) -> Mistakes:
    """Mistakes in the settings of a mixture of experts."""
    megatron = config.policy.megatron_cfg
    kind, weight = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    return {
        f"policy.megatron_cfg.moe_router_load_balancing_type is {kind!r}, and moe_aux_loss_coeff {weight:g}; for a "
        "load-balancing loss set both, such as seq_aux_loss and 0.001, or else none and 0": (
            (kind == "none") != (weight == 0)
        ),
        f"policy.router_replay is true, but algorithm {config.algorithm!r} generates nothing to replay; set it to "
        "false": config.policy.router_replay and not generates(config),
    }
