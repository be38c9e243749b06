"""Checks of settings that contradict each other, without looking at the machine."""

from __future__ import annotations

import logging
from typing import Literal

from dagrl.config import Config, PolicyConfig, ProcessConfig
from dagrl.config.roles import CRITIC, role_config
from dagrl.config.settings import (
    bucket_widths,
    compares,
    generates,
    generation_config,
    layouts,
    rows_per_sample,
    samples_per_step,
    uses_critic,
    uses_reference,
    width_key,
)
from dagrl.config.worker_checks import (
    Mistakes,
    adapter_mistakes,
    check_shared_gpus,
    colocation_mistakes,
    communication_mistakes,
    cuda_graph_mistakes,
    delta_mistakes,
    engine_mistakes,
    expert_mistakes,
    prefix_mistakes,
    refuse,
    speculation_mistakes,
)
from dagrl.errors import LayoutError

logger = logging.getLogger(__name__)

MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this (`_MAX_TEMP` in its sampling_params.py) to avoid NaN and infinity."""


def check_settings(config: Config) -> None:
    """Checks the configuration without looking at the machine. Raises a UserError that says what to change."""
    refuse(_choice_mistakes(config))
    refuse(_microbatch_mistakes(config.policy))
    refuse(_length_mistakes(config))
    refuse(_batch_mistakes(config), LayoutError)
    for mistakes in (
        _function_mistakes,
        _rate_mistakes,
        _truncation_mistakes,
        _async_mistakes,
        _on_policy_mistakes,
        _agent_mistakes,
        colocation_mistakes,
        delta_mistakes,
        adapter_mistakes,
        speculation_mistakes,
        cuda_graph_mistakes,
        communication_mistakes,
        _model_mistakes,
        expert_mistakes,
        prefix_mistakes,
        engine_mistakes,
    ):
        refuse(mistakes(config))
    check_shared_gpus(config)
    if uses_critic(config):
        _check_critic(config)


def warn_of_settings(config: Config) -> None:
    """Warns of settings that are allowed, and rarely what is wanted."""
    _warn_of_cut_sampling(config)
    _warn_of_old_samples(config)


def _choice_mistakes(config: Config) -> Mistakes:
    policy, widest = config.policy, bucket_widths(config.policy)[-1]
    found, limit = "neither" if policy.model_name is None else "both", policy.max_total_sequence_length
    return {
        f"policy.model_name and policy.random_init: found {found}; set one of them": (
            (policy.model_name is None) == (policy.random_init is None)
        ),
        f"policy.sequence_buckets has {widest}, more than policy.max_total_sequence_length {limit}; raise the limit or drop "
        "the bucket": widest > limit,
    }


def _length_mistakes(config: Config) -> Mistakes:
    if not generates(config):
        return {}
    generation, widest, key = generation_config(config), bucket_widths(config.policy)[-1], width_key(config.policy)
    new, length, heat = generation.max_new_tokens, generation.vllm_cfg.max_model_len or widest, generation.temperature
    return {
        f"policy.generation.max_new_tokens is {new}, but the largest bucket has {widest} tokens: no room for a prompt. "
        f"Lower it, or raise {key}": new >= widest,
        f"policy.generation.vllm_cfg.max_model_len is {length}, shorter than the largest bucket of {widest} tokens; raise "
        f"it, or lower {key}": length < widest,
        f"policy.generation.temperature is {heat:g}, which vLLM raises to {MIN_TEMPERATURE:g}: log-probabilities of train "
        f"workers would not match. Set it to 0 (greedy), or to {MIN_TEMPERATURE:g} or more": 0 < heat < MIN_TEMPERATURE,
    }


def _microbatch_mistakes(policy: PolicyConfig) -> Mistakes:
    packed, widest = policy.sequence_packing.enabled, bucket_widths(policy)[-1]
    purposes: tuple[Literal["train", "logprob"], ...] = ("train", "logprob")
    tokens = {purpose: policy.microbatch_tokens(purpose) for purpose in purposes}
    return {
        f"policy.sequence_packing.{purpose}_mb_tokens is {found}, less than the largest bucket of {widest} tokens; set it "
        f"to {widest} or more, as sequences are not split": packed and found < widest
        for purpose, found in tokens.items()
    }


def _batch_mistakes(config: Config) -> Mistakes:
    dp, size = layouts(config)["train"].dp, config.policy.train_global_batch_size
    grpo, samples = config.grpo, samples_per_step(config)
    near = sorted({size // dp * dp or dp, -(-size // dp) * dp})
    fitting = " or ".join(str(one) for one in near if not generates(config) or samples % one == 0)
    return {
        f"policy.train_global_batch_size {size} is not divisible by data_parallel_size {dp}; "
        + (f"set it to {fitting}" if fitting else "change grpo.num_prompts_per_step")
        + ", or change data_parallel_size": size % dp != 0,
        f"grpo.num_prompts_per_step {grpo.num_prompts_per_step} x num_generations_per_prompt "
        f"{grpo.num_generations_per_prompt} = {samples} samples, not a multiple of policy.train_global_batch_size {size}; "
        f"set that to a divisor of {samples}": generates(config) and samples % size != 0,
    }


def _rate_mistakes(config: Config) -> Mistakes:
    """Of the schedule, which rises to `optimizer.lr` and falls from it. `sft.lr` is constant and not part of it."""
    megatron, rate = config.policy.megatron_cfg, config.policy.megatron_cfg.optimizer.lr
    start, end = megatron.scheduler.lr_warmup_init, megatron.optimizer.min_lr
    return {
        f"policy.megatron_cfg.scheduler.lr_warmup_init is {start:g}, above policy.megatron_cfg.optimizer.lr {rate:g}, where "
        f"the warm-up ends; set it to {rate:g} or less": start > rate,
        f"policy.megatron_cfg.optimizer.min_lr is {end:g}, above lr {rate:g}, where the decay starts; set it to {rate:g} or "
        "less": end > rate,
    }


def _function_mistakes(config: Config) -> Mistakes:
    reward, tasks = config.reward, config.data.mixture
    nothing = reward.function is None and not reward.functions and not config.environment.enabled
    sections: dict[str, ProcessConfig] = {"reward": reward, "environment": config.environment}
    sections |= {f"reward.functions.{name}": item for name, item in reward.functions.items()}
    return {
        "reward.function is null, and there is no environment to give rewards; set one of them": nothing,
        **{
            f"reward.functions.{name}.tasks has {task!r}, which is not in data.mixture; expected: "
            f"{', '.join(tasks) or 'no tasks'}": task not in tasks
            for name, function in reward.functions.items()
            for task in function.tasks or ()
        },
        **{
            f"{name}.call_timeout_s is {section.call_timeout_s:g} s, less than {name}.timeout_s {section.timeout_s:g} s of "
            f"a single answer; set it to a multiple of {section.timeout_s:g}, or leave it out": (
                section.call_timeout_s < section.timeout_s
            )
            for name, section in sections.items()
            if section.call_timeout_s is not None
        },
    }


def _truncation_mistakes(config: Config) -> Mistakes:
    """Bounds of importance weights without an upper bound, or without weights to bound."""
    loss = config.loss_fn
    bounded = loss.truncated_importance_sampling_ratio is not None
    others = loss.truncated_importance_sampling_type != "tis" or loss.truncated_importance_sampling_ratio_min is not None
    return {
        "loss_fn.truncated_importance_sampling_type or _ratio_min is set without the upper bound, "
        "loss_fn.truncated_importance_sampling_ratio; set it (2 is usual), or leave all three out": others and not bounded,
        "loss_fn.truncated_importance_sampling_ratio is set, but the correction that it bounds is off; set "
        "loss_fn.use_importance_sampling_correction=true, or leave the bound out": (
            bounded and not loss.use_importance_sampling_correction
        ),
    }


def _async_mistakes(config: Config) -> Mistakes:
    settings = config.grpo.async_grpo
    return {
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates is true, but no request runs during an update; set "
        "in_flight_weight_updates=true, or leave it out": settings.enabled
        and generates(config)
        and settings.recompute_kv_cache_after_weight_updates
        and not settings.in_flight_weight_updates
    }


def _on_policy_mistakes(config: Config) -> Mistakes:
    """What keeps `loss_fn.force_on_policy_ratio` from having one optimizer step per batch, so that ratios are 1."""
    if not config.loss_fn.force_on_policy_ratio or not generates(config):
        return {}
    kind = config.loss_fn.truncated_importance_sampling_type
    return _several_steps(config, "loss_fn.force_on_policy_ratio", "after the first step, ratios are not 1") | {
        f"loss_fn.force_on_policy_ratio is true, but loss_fn.truncated_importance_sampling_type {kind!r} needs "
        "log-probabilities of whole sequences before the step; choose tis or icepop, or set force_on_policy_ratio=false": (
            kind.startswith("seq-")
        )
    }


def _several_steps(config: Config, option: str, why: str) -> dict[str, bool]:
    """The mistake that a generated batch has several optimizer steps, which the enabled `option` rules out."""
    samples, size = samples_per_step(config), config.policy.train_global_batch_size
    return {
        f"{option} is true, but a batch of {samples} samples has several optimizer steps of policy.train_global_batch_size "
        f"{size}: {why}. Set policy.train_global_batch_size={samples}, or {option}=false": size != samples
    }


def _agent_mistakes(config: Config) -> Mistakes:
    """What takes samples of one conversation, while the episodes of an agent may have several."""
    most = rows_per_sample(config)
    return {
        "policy.router_replay is true, but the experts of an agent's conversations (environment.agent) are not kept. Set it "
        "to false": config.environment.agent is not None and config.policy.router_replay,
        f"environment.max_conversations is {most}, but the algorithm has a critic, which judges samples of one "
        "conversation. Set max_conversations=1, or use an algorithm without a critic": most > 1 and uses_critic(config),
    }


def _model_mistakes(config: Config) -> Mistakes:
    """Of the models next to the policy: whether anything uses them, and where they are."""
    algorithm, teacher, kl = config.algorithm, config.teacher is not None, config.ppo.kl_in_reward
    groups_of_one = generates(config) and config.grpo.num_generations_per_prompt == 1
    return {
        "teacher and policy.reference_model_name are both set, but there is one reference policy; leave one out: the "
        "teacher has workers of its own, policy.reference_model_name is on the train workers": (
            teacher and config.policy.reference_model_name is not None
        ),
        f"teacher is set, but algorithm {algorithm} compares pairs with a reference policy on the train workers; set "
        "policy.reference_model_name to the model, and leave teacher out": teacher and compares(config),
        f"teacher is set, but algorithm {algorithm} does not read 'reference_logprobs'; leave teacher out, or add the "
        "column to the algorithm's `columns`": teacher and not uses_reference(config),
        f"grpo.num_generations_per_prompt is 1, but algorithm {algorithm} compares the completions of a prompt; set it to 2 "
        "or more, or use a critic (algorithm=ppo)": groups_of_one and not uses_critic(config),
        "grpo.num_generations_per_prompt is 1, but grpo.use_dynamic_sampling drops groups whose rewards are all equal; set "
        "it to false, or generate 2 or more": groups_of_one and config.grpo.use_dynamic_sampling,
        f"ppo.kl_in_reward is true, but algorithm {algorithm} has no critic; set it to false, or algorithm=ppo": (
            kl and not uses_critic(config)
        ),
        f"ppo.kl_in_reward is true, but algorithm {algorithm} does not read 'reference_logprobs'; set "
        "loss_fn.reference_policy_kl_penalty above 0, or kl_in_reward=false": kl and not uses_reference(config),
        "ppo.kl_in_reward and loss_fn.force_on_policy_ratio are both true, but the KL of a token needs its log-probability "
        "before the step; set one to false": kl and config.loss_fn.force_on_policy_ratio,
    }


def _check_critic(config: Config) -> None:
    """Checks the critic's batches, which its workers read in `policy`."""
    try:
        refuse(_batch_mistakes(role_config(config, CRITIC)), LayoutError)
    except LayoutError as error:
        raise LayoutError(str(error).replace("policy.", "critic.")) from error


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


def _warn_of_old_samples(config: Config) -> None:
    """Warns of asynchronous training that costs more than it brings."""
    settings = config.grpo.async_grpo
    if not settings.enabled or not generates(config):
        return
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
