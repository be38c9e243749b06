"""Checks of settings that contradict each other, without looking at the machine."""

from __future__ import annotations

import logging
import re
from typing import Literal

from dagrl.config import Config, GenerationConfig, PolicyConfig, ProcessConfig
from dagrl.config.roles import CRITIC, role_config
from dagrl.config.settings import (
    bucket_widths,
    compares,
    generates,
    generation_config,
    layouts,
    model_roles,
    rows_per_sample,
    samples_per_step,
    uses_critic,
    uses_reference,
    width_key,
)
from dagrl.config.worker_checks import (
    check_adapters,
    check_colocated,
    check_communication,
    check_cuda_graphs,
    check_delta,
    check_experts,
    check_shared_gpus,
    check_shared_prefixes,
    check_spares,
    check_speculation,
)
from dagrl.errors import ConfigError, LayoutError, UserError

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this (`_MAX_TEMP` in its sampling_params.py) to avoid NaN and infinity."""


def check_settings(config: Config) -> None:
    """Checks the configuration without looking at the machine. Raises a UserError that says what to change."""
    _check_choices(config)
    _check_batches(config)
    _check_rates(config)
    _check_functions(config)
    _check_truncation(config)
    _warn_of_cut_sampling(config)
    _check_async(config)
    _check_on_policy(config)
    _check_overlap(config)
    _check_agent(config)
    check_colocated(config)
    check_delta(config)
    check_shared_gpus(config)
    check_adapters(config)
    check_speculation(config)
    check_cuda_graphs(config)
    check_communication(config)
    _check_models(config)
    check_experts(config)
    check_shared_prefixes(config)
    check_spares(config)
    if config.timeouts.orphan_s and config.executor == "compiled" and config.executor_cfg.engine == "ray":
        raise ConfigError(
            f"timeouts.orphan_s is {config.timeouts.orphan_s:g}, and executor_cfg.engine: ray: graphs of Ray's engine do "
            "not end on workers whose driver has died; set engine: dagrl, or orphan_s: 0"
        )


def _check_choices(config: Config) -> None:
    policy = config.policy
    if (policy.model_name is None) == (policy.random_init is None):
        found = "neither" if policy.model_name is None else "both"
        raise ConfigError(f"policy.model_name and policy.random_init: found {found}; set one of them")
    widest = bucket_widths(policy)[-1]
    if widest > policy.max_total_sequence_length:
        raise ConfigError(
            f"policy.sequence_buckets has {widest}, more than policy.max_total_sequence_length "
            f"{policy.max_total_sequence_length}; raise the limit or drop the bucket"
        )
    _check_microbatches(policy, widest)
    if generates(config):
        _check_lengths(generation_config(config), widest, width_key(policy))
        _check_temperature(generation_config(config).temperature)


def _check_lengths(generation: GenerationConfig, widest: int, key: str) -> None:
    new, length = generation.max_new_tokens, generation.vllm_cfg.max_model_len
    if new >= widest:
        raise ConfigError(
            f"policy.generation.max_new_tokens is {new}, but the largest bucket has {widest} tokens: no room for a "
            f"prompt. Lower it, or raise {key}"
        )
    if length is not None and length < widest:
        raise ConfigError(
            f"policy.generation.vllm_cfg.max_model_len is {length}, shorter than the largest bucket of {widest} tokens; "
            f"raise it, or lower {key}"
        )


def _check_temperature(temperature: float) -> None:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError(
            f"policy.generation.temperature is {temperature:g}, which vLLM raises to {MIN_TEMPERATURE:g}: log-probabilities "
            f"of train workers would not match. Set it to 0 (greedy), or to {MIN_TEMPERATURE:g} or more"
        )


def _check_microbatches(policy: PolicyConfig, widest: int) -> None:
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    if packing.enabled and dynamic.enabled:
        raise ConfigError(
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true; set one to false"
        )
    purposes: tuple[Literal["train", "logprob"], ...] = ("train", "logprob")
    for purpose in purposes if packing.enabled else ():
        tokens = policy.microbatch_tokens(purpose)
        if tokens < widest:
            raise ConfigError(
                f"policy.sequence_packing.{purpose}_mb_tokens is {tokens}, less than the largest bucket of {widest} tokens; "
                f"set it to {widest} or more, as sequences are not split"
            )


def _check_batches(config: Config) -> None:
    dp, size = layouts(config)["train"].dp, config.policy.train_global_batch_size
    if size % dp:
        raise LayoutError(
            f"policy.train_global_batch_size {size} is not divisible by data_parallel_size {dp}; "
            f"set it to {size // dp * dp or dp} or {-(-size // dp) * dp}, or change data_parallel_size"
        )
    samples = samples_per_step(config)
    if generates(config) and samples % size:
        raise LayoutError(
            f"grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{config.grpo.num_generations_per_prompt} = {samples} samples, not a multiple of "
            f"policy.train_global_batch_size {size}; set that to a divisor of {samples}"
        )


def _check_rates(config: Config) -> None:
    """Checks that the schedule rises to `optimizer.lr` and falls from it. `sft.lr` is constant and not part of it."""
    megatron = config.policy.megatron_cfg
    start, rate = megatron.scheduler.lr_warmup_init, megatron.optimizer.lr
    if start > rate:
        raise ConfigError(
            f"policy.megatron_cfg.scheduler.lr_warmup_init is {start:g}, above policy.megatron_cfg.optimizer.lr {rate:g}, "
            f"where the warm-up ends; set it to {rate:g} or less"
        )
    if megatron.optimizer.min_lr > rate:
        raise ConfigError(
            f"policy.megatron_cfg.optimizer.min_lr is {megatron.optimizer.min_lr:g}, above lr {rate:g}, where the decay "
            f"starts; set it to {rate:g} or less"
        )


def _check_functions(config: Config) -> None:
    sections: dict[str, ProcessConfig] = {"reward": config.reward, "environment": config.environment}
    sections |= {f"reward.functions.{name}": item for name, item in config.reward.functions.items()}
    if config.reward.function is None and not config.reward.functions and not config.environment.enabled:
        raise ConfigError("reward.function is null, and there is no environment to give rewards; set one of them")
    for name, function in config.reward.functions.items():
        for task in function.tasks or ():
            if task not in config.data.mixture:
                tasks = ", ".join(config.data.mixture) or "no tasks"
                raise ConfigError(
                    f"reward.functions.{name}.tasks has {task!r}, which is not in data.mixture; expected: {tasks}"
                )
    for name, section in sections.items():
        if section.call_timeout_s is not None and section.call_timeout_s < section.timeout_s:
            raise ConfigError(
                f"{name}.call_timeout_s is {section.call_timeout_s:g} s, less than {name}.timeout_s {section.timeout_s:g} s "
                f"of a single answer; set it to a multiple of {section.timeout_s:g}, or leave it out"
            )


def _check_truncation(config: Config) -> None:
    """Checks that bounds of importance weights include an upper bound, and that there are weights to bound."""
    loss = config.loss_fn
    if loss.truncated_importance_sampling_ratio is None:
        if loss.truncated_importance_sampling_type != "tis" or loss.truncated_importance_sampling_ratio_min is not None:
            raise ConfigError(
                "loss_fn.truncated_importance_sampling_type or _ratio_min is set without the upper bound, "
                "loss_fn.truncated_importance_sampling_ratio; set it (2 is usual), or leave all three out"
            )
    elif not loss.use_importance_sampling_correction:
        raise ConfigError(
            "loss_fn.truncated_importance_sampling_ratio is set, but the correction that it bounds is off; set "
            "loss_fn.use_importance_sampling_correction=true, or leave the bound out"
        )


def _warn_of_cut_sampling(config: Config) -> None:
    """Warns if top-p or top-k make log-probabilities of generation incomparable with those of the train workers."""
    if not config.loss_fn.use_importance_sampling_correction or not generates(config):
        return
    generation = generation_config(config)
    if generation.top_p < 1 or (generation.top_k or 0) > 0:
        logger.warning(
            "policy.generation.top_p %g or top_k %s truncates the sampling distribution. Generation's log-probabilities are "
            "of the truncated distribution, the train workers' of the whole, so the weights of "
            "loss_fn.use_importance_sampling_correction are too small for every token. Set top_p=1 and top_k=null",
            generation.top_p,
            generation.top_k,
        )


def _check_async(config: Config) -> None:
    """Checks asynchronous training for contradictions, and warns of settings that cost more than they bring."""
    settings = config.grpo.async_grpo
    if not settings.enabled or not generates(config):
        return
    if settings.recompute_kv_cache_after_weight_updates and not settings.in_flight_weight_updates:
        raise ConfigError(
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates is true, but no request runs during an update; set "
            "in_flight_weight_updates=true, or leave it out"
        )
    if settings.max_trajectory_age_steps > 1 and not settings.in_flight_weight_updates:
        logger.warning(
            "grpo.async_grpo.max_trajectory_age_steps is %d without in_flight_weight_updates: every update waits until all "
            "running requests finish, so ages above 1 make samples older and steps hardly faster. Set "
            "in_flight_weight_updates=true, or max_trajectory_age_steps=1",
            settings.max_trajectory_age_steps,
        )
    if settings.max_trajectory_age_steps and not config.loss_fn.use_importance_sampling_correction:
        logger.warning(
            "grpo.async_grpo trains on samples of older policies, but loss_fn.use_importance_sampling_correction is false, "
            "which biases the gradient. Set it to true, with loss_fn.truncated_importance_sampling_ratio=2 for example"
        )


def _check_on_policy(config: Config) -> None:
    """Checks that `loss_fn.force_on_policy_ratio` has one optimizer step per batch, so that ratios are 1."""
    if not config.loss_fn.force_on_policy_ratio or not generates(config):
        return
    _check_one_step(config, "loss_fn.force_on_policy_ratio", "after the first step, ratios are not 1")
    if config.loss_fn.truncated_importance_sampling_type == "seq-mask-tis":
        raise ConfigError(
            "loss_fn.force_on_policy_ratio is true, but loss_fn.truncated_importance_sampling_type 'seq-mask-tis' needs "
            "log-probabilities of whole sequences before the step; choose tis or icepop, or set force_on_policy_ratio=false"
        )


def _check_agent(config: Config) -> None:
    """Checks that nothing that takes samples of one conversation is on with an agent, whose episodes may have several."""
    most = rows_per_sample(config)
    if config.environment.agent is not None and config.policy.router_replay:
        raise ConfigError(
            "policy.router_replay is true, but the experts of an agent's conversations (environment.agent) are not kept. "
            "Set it to false"
        )
    if most > 1 and uses_critic(config):
        raise ConfigError(
            f"environment.max_conversations is {most}, but the algorithm has a critic, which judges samples of one "
            "conversation. Set max_conversations=1, or use an algorithm without a critic"
        )
    if most > 1 and config.grpo.overlap_logprobs:
        raise ConfigError(
            f"grpo.overlap_logprobs is true, and environment.max_conversations is {most}: early work takes samples of one "
            "conversation. Set overlap_logprobs=false, or max_conversations=1"
        )


def _check_overlap(config: Config) -> None:
    """Checks that `grpo.overlap_training` can train on rows before the batch is complete, in any order."""
    if not config.grpo.overlap_training or not generates(config):
        return
    if not config.grpo.overlap_logprobs:
        raise ConfigError(
            "grpo.overlap_training is true, but grpo.overlap_logprobs is false: the gradients of a row need its "
            "log-probabilities. Set both to true"
        )
    _check_one_step(config, "grpo.overlap_training", "the first step would change the weights during generation")
    if config.grpo.num_prompts_per_step == 1:
        raise ConfigError(
            "grpo.overlap_training is true, but grpo.num_prompts_per_step is 1: there is nothing to train on before the "
            "batch is complete. Set overlap_training=false, or take more prompts per step"
        )
    if config.reward.shuffle:
        raise ConfigError(
            "grpo.overlap_training and reward.shuffle are both true: rewards shuffled over the batch are not known until it "
            "is complete. Set one to false"
        )


def _check_one_step(config: Config, option: str, why: str) -> None:
    """Raises ConfigError if a generated batch has several optimizer steps, which the enabled `option` rules out."""
    samples, size = samples_per_step(config), config.policy.train_global_batch_size
    if size != samples:
        raise ConfigError(
            f"{option} is true, but a batch of {samples} samples has several optimizer steps of "
            f"policy.train_global_batch_size {size}: {why}. Set policy.train_global_batch_size={samples}, or {option}=false"
        )


def _check_models(config: Config) -> None:
    """Checks the models next to the policy: whether anything uses them, where they are, and their batches."""
    if config.teacher is not None and config.policy.reference_model_name is not None:
        raise ConfigError(
            "teacher and policy.reference_model_name are both set, but there is one reference policy; leave one out: the "
            "teacher has workers of its own, policy.reference_model_name is on the train workers"
        )
    if config.teacher is not None and compares(config):
        raise ConfigError(
            f"teacher is set, but algorithm {config.algorithm} compares pairs with a reference policy on the train workers; "
            "set policy.reference_model_name to the model, and leave teacher out"
        )
    if config.teacher is not None and not uses_reference(config):
        raise ConfigError(
            f"teacher is set, but algorithm {config.algorithm} does not read 'reference_logprobs'; leave teacher out, or "
            "add the column to the algorithm's `columns`"
        )
    groups_of_one = config.grpo.num_generations_per_prompt == 1
    if groups_of_one and generates(config) and not uses_critic(config):
        raise ConfigError(
            f"grpo.num_generations_per_prompt is 1, but algorithm {config.algorithm} compares the completions of a prompt; "
            "set it to 2 or more, or use a critic (algorithm=ppo)"
        )
    if groups_of_one and generates(config) and config.grpo.use_dynamic_sampling:
        raise ConfigError(
            "grpo.num_generations_per_prompt is 1, but grpo.use_dynamic_sampling drops groups whose rewards are all equal; "
            "set it to false, or generate 2 or more"
        )
    if config.ppo.kl_in_reward and not uses_critic(config):
        raise ConfigError(
            f"ppo.kl_in_reward is true, but algorithm {config.algorithm} has no critic; set it to false, or algorithm=ppo"
        )
    if config.ppo.kl_in_reward and config.loss_fn.force_on_policy_ratio:
        raise ConfigError(
            "ppo.kl_in_reward and loss_fn.force_on_policy_ratio are both true, but the KL of a token needs its "
            "log-probability before the step; set one to false"
        )
    for role in model_roles(config):
        _check_role(config, role)


def _check_role(config: Config, role: str) -> None:
    own = role_config(config, role)
    try:
        _check_microbatches(own.policy, bucket_widths(own.policy)[-1])
        check_communication(own)
        check_cuda_graphs(own)
        if role == CRITIC:
            _check_batches(own)
            _check_rates(own)
    except UserError as error:
        raise type(error)(re.sub(r"\bpolicy\.(?!generation)", f"{role}.", str(error))) from error
