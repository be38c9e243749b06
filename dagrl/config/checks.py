"""Checks of settings that contradict each other, without looking at the machine.

A section checks its own keys while it is read (validators of `dagrl.config`). Here is what concerns several of them.
"""

import logging
from typing import Literal

from dagrl.config import Config, GenerationConfig, PolicyConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, TRAIN, role_config
from dagrl.config.settings import (
    SLOT_RANKS,
    bucket_widths,
    generation_config,
    rows_per_sample,
    samples_per_step,
    sends_adapters,
    unshared_reason,
    width_key,
)
from dagrl.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)


def check_settings(config: Config, plan: RunPlan, *, lengths: bool = True) -> None:
    """Checks the configuration without looking at the machine. Raises a UserError that says what to change.

    `lengths`: whether the longest sequence is known. One that follows from the data is a guess until they are read.
    """
    _check_policy(config.policy, lengths)
    if plan.generates and lengths:
        _check_lengths(config.policy, generation_config(config))
    _check_batches(config, plan)
    _check_rewards(config, plan)
    if plan.generates:
        _check_samples(config, plan)
    if plan.learns_from == "demonstrations" and not config.sft.max_num_steps:
        raise ConfigError(
            f"sft.max_num_steps is 0, so algorithm {config.algorithm} would train nothing; set it to 1 or more"
        )
    if config.models and plan.learns_from != "samples":
        raise ConfigError(
            f"models.{next(iter(config.models))} is set, but algorithm {config.algorithm} learns from {plan.learns_from}, "
            "which no phase runs it for; leave it out. The reference policy of pairs is the first policy"
        )
    _check_shared_gpus(config, plan)
    _check_training(config, plan)
    if config.policy.router_replay and not plan.generates:
        raise ConfigError(
            f"policy.router_replay is true, but algorithm {config.algorithm!r} generates nothing to replay; set it to false"
        )


def _check_policy(policy: PolicyConfig, lengths: bool) -> None:
    widest, limit = bucket_widths(policy)[-1], policy.max_total_sequence_length
    if (policy.model_name is None) == (policy.random_init is None):
        found = "neither" if policy.model_name is None else "both"
        raise ConfigError(f"policy.model_name and policy.random_init: found {found}; set one of them, and the other to null")
    if widest > limit:
        raise ConfigError(
            f"policy.sequence_buckets has {widest}, more than policy.max_total_sequence_length {limit}; raise the limit or "
            "drop the bucket"
        )
    if not policy.sequence_packing.enabled or not lengths:
        return
    purposes: tuple[Literal["train", "logprob"], ...] = ("train", "logprob")
    for purpose in purposes:
        if (found_tokens := policy.microbatch_tokens(purpose)) < widest:
            raise ConfigError(
                f"policy.sequence_packing.{purpose}_mb_tokens is {found_tokens}, less than the largest bucket of {widest} "
                f"tokens; set it to {widest} or more, as sequences are not split"
            )


def _check_lengths(policy: PolicyConfig, generation: GenerationConfig) -> None:
    widest, key, new = bucket_widths(policy)[-1], width_key(policy), generation.max_new_tokens
    if new >= widest:
        raise ConfigError(
            f"policy.generation.max_new_tokens is {new}, but the largest bucket has {widest} tokens: no room for a prompt. "
            f"Lower it, or raise {key}"
        )
    if (length := generation.vllm_cfg.max_model_len or widest) < widest:
        raise ConfigError(
            f"policy.generation.vllm_cfg.max_model_len is {length}, shorter than the largest bucket of {widest} tokens; "
            f"raise it, or lower {key}"
        )


def _check_batches(config: Config, plan: RunPlan) -> None:
    size, samples, grpo = config.policy.train_global_batch_size, samples_per_step(config), config.grpo
    for role in (TRAIN, CRITIC) if plan.critic else (TRAIN,):
        dp = plan.layouts[role].dp
        if size % dp:
            near = sorted({size // dp * dp or dp, -(-size // dp) * dp})
            fitting = " or ".join(str(one) for one in near if not plan.generates or samples % one == 0)
            raise LayoutError(
                f"policy.train_global_batch_size {size} is not divisible by data_parallel_size {dp} of the {role} workers; "
                + (f"set it to {fitting}" if fitting else "change grpo.num_prompts_per_step")
                + ", or change data_parallel_size"
            )
    if plan.generates and samples % size:
        raise LayoutError(
            f"grpo.num_prompts_per_step {grpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{grpo.num_generations_per_prompt} = {samples} samples, not a multiple of policy.train_global_batch_size "
            f"{size}; set that to a divisor of {samples}"
        )


def _check_rewards(config: Config, plan: RunPlan) -> None:
    reward, tasks = config.reward, config.data.mixture
    if plan.generates and reward.function is None and not reward.functions and not config.environment.enabled:
        raise ConfigError("reward.function is null, and there is no environment to give rewards; set one of them")
    for name, function in reward.functions.items():
        for task in function.tasks or ():
            if task not in tasks:
                raise ConfigError(
                    f"reward.functions.{name}.tasks has {task!r}, which is not in data.mixture; expected: "
                    f"{', '.join(tasks) or 'no tasks'}"
                )


def _check_samples(config: Config, plan: RunPlan) -> None:
    """Checks what concerns a batch of samples: importance weights, groups, and the conversations of an agent."""
    loss, samples, size = config.loss_fn, samples_per_step(config), config.policy.train_global_batch_size
    if loss.force_on_policy_ratio and samples != size:
        raise ConfigError(
            f"loss_fn.force_on_policy_ratio is true, but a batch of {samples} samples has several optimizer steps of "
            f"policy.train_global_batch_size {size}: after the first step, ratios are not 1. Set "
            f"policy.train_global_batch_size={samples}, or loss_fn.force_on_policy_ratio=false"
        )
    if config.grpo.num_generations_per_prompt == 1 and not plan.critic:
        raise ConfigError(
            f"grpo.num_generations_per_prompt is 1, but algorithm {config.algorithm} compares the completions of a prompt; "
            "set it to 2 or more, or use a critic (algorithm=ppo)"
        )
    agent, most = config.environment.agent is not None, rows_per_sample(config)
    if agent and config.policy.router_replay:
        raise ConfigError(
            "policy.router_replay is true, but the experts of an agent's conversations (environment.agent) are not kept. "
            "Set it to false"
        )
    if most > 1 and plan.critic:
        raise ConfigError(
            f"environment.max_conversations is {most}, but the algorithm has a critic, which judges samples of one "
            "conversation. Set max_conversations=1, or use an algorithm without a critic"
        )


def _check_shared_gpus(config: Config, plan: RunPlan) -> None:
    """Checks what needs GPUs of its own, or both roles of shared GPUs at once."""
    if plan.colocated:
        if config.grpo.async_grpo.enabled:
            raise ConfigError(
                "policy.generation.colocated.enabled and grpo.async_grpo.enabled are both true, but colocated workers take "
                "turns on their GPUs; set one to false"
            )
        if plan.takes_turns and plan.reference is not None and config.policy.reference_weights == "device":
            raise ConfigError(
                "policy.generation.colocated.enabled is true, but policy.reference_weights is 'device', which keeps the "
                "reference policy on the GPU during generation; set policy.reference_weights to host, or "
                "policy.generation.colocated.exchange to never"
            )
    share = config.cluster.gpus_per_worker
    for role, layout in plan.layouts.items() if share is not None and 0 < share < 1 else ():
        if layout.world_size > 1:
            raise LayoutError(
                f"cluster.gpus_per_worker is {share:g}, so several of the {layout.world_size} {role} workers "
                f"({layout.describe()}) share a GPU, where NCCL cannot connect them; set it to 1, or use one {role} worker"
            )


def _check_training(config: Config, plan: RunPlan) -> None:
    policy, megatron = config.policy, config.policy.megatron_cfg
    rate, start, end = policy.optimizer.lr, policy.scheduler.lr_warmup_init, policy.optimizer.min_lr
    if start > rate:
        raise ConfigError(
            f"policy.scheduler.lr_warmup_init is {start:g}, above policy.optimizer.lr {rate:g}, "
            f"where the warm-up ends; set it to {rate:g} or less"
        )
    if end > rate:
        raise ConfigError(
            f"policy.optimizer.min_lr is {end:g}, above lr {rate:g}, where the decay starts; set it to {rate:g} or less"
        )
    if plan.generates and sends_adapters(config):
        _check_adapters(config, generation_config(config))
    if megatron.cuda_graphs:
        _check_cuda_graphs(policy, plan)
    for role in (TRAIN, *plan.model_roles):
        own = role_config(config, role).policy
        if own.sequence_packing.shared_prefix is True and (reason := unshared_reason(own)):
            raise ConfigError(
                f"sequence_packing.shared_prefix is true for {role} workers, but {reason}, or set shared_prefix=auto"
            )


def _check_adapters(config: Config, generation: GenerationConfig) -> None:
    """Checks that vLLM's LoRA slots hold a refit of adapters alone."""
    dim, advice = config.policy.peft.dim, "change it, or set policy.peft.refit=merged"
    if dim > SLOT_RANKS[-1]:
        raise ConfigError(f"policy.peft.dim is {dim}, but vLLM's LoRA slots have at most {SLOT_RANKS[-1]}; {advice}")
    if generation.vllm_cfg.precision == "fp8":
        raise ConfigError(
            "policy.generation.vllm_cfg.precision is fp8, but vLLM would quantize the base weights that stay as loaded; "
            f"{advice}"
        )


def _check_cuda_graphs(policy: PolicyConfig, plan: RunPlan) -> None:
    """Checks that a microbatch's forward and backward pass can be captured as CUDA graphs."""
    megatron, packed = policy.megatron_cfg, policy.sequence_packing.enabled
    if megatron.distributed_data_parallel_config.overlap_grad_reduce:
        conflict = "distributed_data_parallel_config.overlap_grad_reduce: a replayed backward pass cannot start reductions"
    elif megatron.layout.pp > 1:
        conflict = f"pipeline_model_parallel_size is {megatron.layout.pp}: a graph replays one microbatch at a time"
    elif megatron.activation_checkpointing:
        conflict = "activation_checkpointing reads the random generator's state, which a graph cannot capture"
    elif plan.takes_turns:
        conflict = "policy.generation.colocated.enabled moves weights to other addresses; colocated.exchange=never does not"
    elif (packed or megatron.layout.cp > 1) and policy.precision != "bfloat16":
        conflict = f"policy.precision is {policy.precision!r}: the kernel of packed and split rows is for bfloat16 only"
    else:
        return
    raise ConfigError(f"policy.megatron_cfg.cuda_graphs is true, but {conflict}. Change that, or set cuda_graphs=false")


def warn_of_settings(config: Config, plan: RunPlan) -> None:
    """Warns of settings that are allowed, and rarely what is wanted."""
    if not plan.generates:
        return
    generation, settings, corrects = (
        generation_config(config),
        config.grpo.async_grpo,
        config.loss_fn.use_importance_sampling_correction,
    )
    if corrects and (generation.top_p < 1 or (generation.top_k or 0) > 0):
        logger.warning(
            "policy.generation.top_p %g or top_k %s truncates the sampling distribution. Generation's log-probabilities are "
            "of the truncated distribution, the train workers' of the whole, so the weights of "
            "loss_fn.use_importance_sampling_correction are too small for every token. Set top_p=1 and top_k=null",
            generation.top_p,
            generation.top_k,
        )
    if not settings.enabled:
        return
    if settings.max_trajectory_age_steps > 1 and not settings.in_flight_weight_updates:
        logger.warning(
            "grpo.async_grpo.max_trajectory_age_steps is %d without in_flight_weight_updates: every update waits until all "
            "running requests finish, so ages above 1 make samples older and steps hardly faster. Set "
            "in_flight_weight_updates=true, or max_trajectory_age_steps=1",
            settings.max_trajectory_age_steps,
        )
    if settings.max_trajectory_age_steps and not corrects:
        logger.warning(
            "grpo.async_grpo trains on samples of older policies, but loss_fn.use_importance_sampling_correction is false, "
            "which biases the gradient. Set it to true, with loss_fn.truncated_importance_sampling_ratio=2 for example"
        )
