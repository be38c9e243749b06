"""What the configuration alone says: its layouts and widths, and which settings cannot be together, on whatever machine."""

from __future__ import annotations

import logging
from typing import Literal

from dagrl.config import Config, GenerationConfig, MegatronConfig, PolicyConfig, VllmConfig
from dagrl.errors import ConfigError, LayoutError
from dagrl.layout import ParallelLayout

logger = logging.getLogger(__name__)

LEAST_TEMPERATURE = 0.01
"""vLLM raises what lies between 0 and this (`_MAX_TEMP` of its sampling_params.py), to keep clear of NaN and infinity."""


def check_settings(config: Config) -> None:
    """What the configuration alone says that cannot be, on whatever machine. Raises a UserError that says what to change."""
    _check_choices(config)
    _check_batches(config)
    _check_rates(config)
    _check_functions(config)
    _check_truncation(config)
    _warn_of_cut_sampling(config)
    _check_async(config)
    _check_on_policy(config)
    _check_overlap(config)
    _check_colocated(config)
    _check_shared_gpus(config)
    _check_cuda_graphs(config)


def layouts(config: Config) -> dict[str, ParallelLayout]:
    """The layout of each worker group that the run starts."""
    groups = {"train": _layout("policy.megatron_cfg", config.policy.megatron_cfg)}
    if config.algorithm == "grpo":
        groups["generation"] = _layout("policy.generation.vllm_cfg", generation_config(config).vllm_cfg)
    return groups


def _layout(key: str, section: MegatronConfig | VllmConfig) -> ParallelLayout:
    try:
        return section.layout
    except LayoutError as error:
        raise LayoutError(f"{key}: {error}") from error


def generation_config(config: Config) -> GenerationConfig:
    """`policy.generation`, which algorithm `grpo` needs."""
    if config.policy.generation is None:
        raise ConfigError("algorithm is 'grpo', but policy.generation is missing; add it, `policy.generation: {}` is enough")
    return config.policy.generation


def generation_dtype(config: Config) -> str:
    """The dtype of what generation workers do not hold in FP8."""
    precision = generation_config(config).vllm_cfg.precision
    return "bfloat16" if precision == "fp8" else precision or config.policy.precision


def has_fp8_kv_cache(config: Config) -> bool:
    """Whether generation's KV cache is in FP8: its scales are calibrated on the train workers, and refits carry them."""
    generation = config.policy.generation
    return generation is not None and generation.vllm_cfg.kv_cache_dtype == "fp8"


def is_colocated(config: Config) -> bool:
    """Whether train and generation workers share their GPUs (`policy.generation.colocated.enabled`)."""
    generation = config.policy.generation
    return config.algorithm == "grpo" and generation is not None and generation.colocated.enabled


def bucket_widths(policy: PolicyConfig) -> tuple[int, ...]:
    """Token widths that phases are warmed up at, ascending."""
    return tuple(sorted(set(policy.sequence_buckets))) or (policy.max_total_sequence_length,)


def width_key(policy: PolicyConfig) -> str:
    """The key that says how long a sequence may be (`bucket_widths`)."""
    return "policy.sequence_buckets" if policy.sequence_buckets else "policy.max_total_sequence_length"


def samples_per_step(config: Config) -> int:
    """Of a batch of GRPO: prompts times generations."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def _check_choices(config: Config) -> None:
    policy = config.policy
    if (policy.model_name is None) == (policy.random_init is None):
        found = "neither" if policy.model_name is None else "both"
        raise ConfigError(f"policy.model_name and policy.random_init: found {found}; set one of them")
    widest = bucket_widths(policy)[-1]
    if widest > policy.max_total_sequence_length:
        raise ConfigError(
            f"policy.sequence_buckets has {widest}, more than policy.max_total_sequence_length "
            f"{policy.max_total_sequence_length}; raise the latter or drop the bucket"
        )
    _check_microbatches(policy, widest)
    if config.algorithm == "grpo":
        new, length = generation_config(config).max_new_tokens, generation_config(config).vllm_cfg.max_model_len
        if new >= widest:
            raise ConfigError(
                f"policy.generation.max_new_tokens is {new}, which leaves no room for a prompt in the largest bucket, "
                f"{widest} tokens; lower it, or raise {width_key(policy)}"
            )
        if length is not None and length < widest:
            raise ConfigError(
                f"policy.generation.vllm_cfg.max_model_len is {length}, shorter than the largest bucket, {widest} tokens"
            )
        _check_temperature(generation_config(config).temperature)


def _check_temperature(temperature: float) -> None:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"policy.generation.temperature is {temperature:g}, and vLLM raises it to {LEAST_TEMPERATURE:g}, so that train "
            f"workers would compute other log-probabilities; set it to 0 (greedy), or to {LEAST_TEMPERATURE:g} or more"
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
                f"policy.sequence_packing.{purpose}_mb_tokens is {tokens}, less than the largest bucket, {widest} tokens, "
                f"and a sequence is never cut; set it to {widest} or more"
            )


def _check_batches(config: Config) -> None:
    dp, size = layouts(config)["train"].dp, config.policy.train_global_batch_size
    if size % dp:
        raise LayoutError(
            f"policy.train_global_batch_size {size} is not divisible by data_parallel_size {dp}; "
            f"choose {size // dp * dp or dp} or {-(-size // dp) * dp} sequences, or another data_parallel_size"
        )
    samples = samples_per_step(config)
    if config.algorithm == "grpo" and samples % size:
        raise LayoutError(
            f"grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{config.grpo.num_generations_per_prompt} = {samples} samples are not divisible into optimizer steps of "
            f"policy.train_global_batch_size {size}; choose a divisor of {samples}"
        )


def _check_rates(config: Config) -> None:
    """The schedule warms up to `optimizer.lr`; `sft.lr`, constant, is beside it."""
    megatron = config.policy.megatron_cfg
    start, rate = megatron.scheduler.lr_warmup_init, megatron.optimizer.lr
    if start > rate:
        raise ConfigError(
            f"policy.megatron_cfg.scheduler.lr_warmup_init is {start:g}, above policy.megatron_cfg.optimizer.lr {rate:g}, "
            "which the warm-up leads to; set it to that or less"
        )
    if megatron.optimizer.min_lr > rate:
        raise ConfigError(
            f"policy.megatron_cfg.optimizer.min_lr is {megatron.optimizer.min_lr:g}, above lr {rate:g}, from which the "
            "schedule falls to it; set it to that or less"
        )


def _check_functions(config: Config) -> None:
    for name, section in (("reward", config.reward), ("environment", config.environment)):
        if section.call_timeout_s is not None and section.call_timeout_s < section.timeout_s:
            raise ConfigError(
                f"{name}.call_timeout_s is {section.call_timeout_s:g} s, and {name}.timeout_s {section.timeout_s:g} s "
                f"of one answer, which is more; set it to a multiple of {section.timeout_s:g}, or leave it out"
            )


def _check_truncation(config: Config) -> None:
    """The bounds of importance weights need an upper one, and weights to bound."""
    loss = config.loss_fn
    if loss.truncated_importance_sampling_ratio is None:
        if loss.truncated_importance_sampling_type != "tis" or loss.truncated_importance_sampling_ratio_min is not None:
            raise ConfigError(
                "loss_fn.truncated_importance_sampling_type or _ratio_min is set, but truncated_importance_sampling_ratio, "
                "the upper bound, is not; set it (2 is usual), or leave all three out"
            )
    elif not loss.use_importance_sampling_correction:
        raise ConfigError(
            "loss_fn.truncated_importance_sampling_ratio bounds a correction that is off; set "
            "loss_fn.use_importance_sampling_correction=true, or leave the bound out"
        )


def _warn_of_cut_sampling(config: Config) -> None:
    """Log-probabilities of a cut distribution cannot be compared with the train workers'."""
    if config.algorithm != "grpo" or not config.loss_fn.use_importance_sampling_correction:
        return
    generation = generation_config(config)
    if generation.top_p < 1 or (generation.top_k or 0) > 0:
        logger.warning(
            "policy.generation.top_p %g or top_k %s cuts the distribution that is sampled from, and the log-probabilities "
            "kept are of what is left; the train workers' are of the whole. The weights of "
            "loss_fn.use_importance_sampling_correction are then too small for every token: set top_p=1 and top_k=null",
            generation.top_p,
            generation.top_k,
        )


def _check_async(config: Config) -> None:
    """Settings of asynchronous training that contradict each other, or that cost more than they bring."""
    settings = config.grpo.async_grpo
    if config.algorithm != "grpo" or not settings.enabled:
        return
    if settings.recompute_kv_cache_after_weight_updates and not settings.in_flight_weight_updates:
        raise ConfigError(
            "grpo.async_grpo.recompute_kv_cache_after_weight_updates is true, but without in_flight_weight_updates no "
            "request runs during an update; set in_flight_weight_updates=true, or drop it"
        )
    if settings.max_trajectory_age_steps > 1 and not settings.in_flight_weight_updates:
        logger.warning(
            "grpo.async_grpo.max_trajectory_age_steps is %d without in_flight_weight_updates: every update then waits until "
            "all running requests have finished, so that ages above 1 make samples older and little faster; set "
            "in_flight_weight_updates=true, or max_trajectory_age_steps=1",
            settings.max_trajectory_age_steps,
        )
    if settings.max_trajectory_age_steps and not config.loss_fn.use_importance_sampling_correction:
        logger.warning(
            "grpo.async_grpo trains on samples of older policies, but loss_fn.use_importance_sampling_correction is false: "
            "the gradient is biased; set it to true, with loss_fn.truncated_importance_sampling_ratio=2 for example"
        )


def _check_on_policy(config: Config) -> None:
    """What `loss_fn.force_on_policy_ratio` needs: the weights that a batch is trained from are those of its one step."""
    if config.algorithm != "grpo" or not config.loss_fn.force_on_policy_ratio:
        return
    _check_one_step(config, "loss_fn.force_on_policy_ratio", "after the first, ratios are not 1")
    if config.loss_fn.truncated_importance_sampling_type == "seq-mask-tis":
        raise ConfigError(
            "loss_fn.force_on_policy_ratio is true, and loss_fn.truncated_importance_sampling_type is 'seq-mask-tis', which "
            "needs the log-probabilities of whole sequences before the step; choose tis or icepop, or "
            "force_on_policy_ratio=false"
        )


def _check_overlap(config: Config) -> None:
    """What `grpo.overlap_training` needs: rows that can be trained on before the batch is whole, in any order."""
    if config.algorithm != "grpo" or not config.grpo.overlap_training:
        return
    if not config.grpo.overlap_logprobs:
        raise ConfigError(
            "grpo.overlap_training is true, but grpo.overlap_logprobs is false: gradients need the log-probabilities of "
            "their rows first; set both to true"
        )
    _check_one_step(config, "grpo.overlap_training", "the first would change the weights while the batch is generated")
    if config.grpo.num_prompts_per_step == 1:
        raise ConfigError(
            "grpo.overlap_training is true, but grpo.num_prompts_per_step is 1: a batch of one group has nothing to train "
            "on before it is whole; set overlap_training=false, or take more prompts a step"
        )
    if config.reward.shuffle:
        raise ConfigError(
            "grpo.overlap_training and reward.shuffle are both true: rewards are shuffled over the whole batch, so that no "
            "advantage is known before it is there; set one to false"
        )


def _check_one_step(config: Config, option: str, why: str) -> None:
    """That a batch of GRPO has one optimizer step, as the `option` that is on needs."""
    samples, size = samples_per_step(config), config.policy.train_global_batch_size
    if size != samples:
        raise ConfigError(
            f"{option} is true, but a batch of {samples} samples has several optimizer steps of "
            f"policy.train_global_batch_size {size}: {why}. Set policy.train_global_batch_size={samples}, or {option}=false"
        )


def _check_colocated(config: Config) -> None:
    if is_colocated(config) and config.grpo.async_grpo.enabled:
        raise ConfigError(
            "policy.generation.colocated.enabled and grpo.async_grpo.enabled are both true: asynchronous training generates "
            "and trains at the same time, while colocated workers take turns on their GPUs; set one of them to false"
        )
    if is_colocated(config) and config.grpo.overlap_logprobs:
        raise ConfigError(
            "policy.generation.colocated.enabled and grpo.overlap_logprobs are both true: log-probabilities would be "
            "computed while sequences are generated, but colocated workers take turns on their GPUs; set one to false"
        )
    kept = config.policy.reference_weights == "device" and config.loss_fn.reference_policy_kl_penalty > 0
    if is_colocated(config) and kept:
        raise ConfigError(
            "policy.generation.colocated.enabled is true and policy.reference_weights is 'device': the reference policy's "
            "weights would stay on the GPU while generation has it; set policy.reference_weights to host"
        )


def _check_shared_gpus(config: Config) -> None:
    """Workers of one group need a GPU each: NCCL does not connect two processes on one."""
    share = config.cluster.gpus_per_worker
    for role, layout in layouts(config).items() if share is not None and 0 < share < 1 else ():
        if layout.world_size > 1:
            raise LayoutError(
                f"cluster.gpus_per_worker is {share:g}, so that several of the {layout.world_size} {role} workers "
                f"({layout.describe()}) share a GPU, where NCCL cannot connect them; set it to 1, or use one {role} worker"
            )


def _check_cuda_graphs(config: Config) -> None:
    """What a recording of a microbatch's passes cannot have in it."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.cuda_graphs:
        return
    option = "policy.megatron_cfg.cuda_graphs is true"
    if megatron.layout.pp > 1:
        raise ConfigError(
            f"{option}, and pipeline_model_parallel_size is {megatron.layout.pp}: a graph replays one microbatch at a time, "
            "while a pipeline has several on their way; set cuda_graphs=false, or pipeline_model_parallel_size=1"
        )
    if megatron.activation_checkpointing:
        raise ConfigError(
            f"{option}, and so is activation_checkpointing, which looks at the random generator's state, as nothing in a "
            "graph may; set one to false"
        )
    if is_colocated(config):
        raise ConfigError(
            f"{option}, and so is policy.generation.colocated.enabled: weights come back at other addresses in every step, "
            "and graphs would be recorded anew each time; set one to false"
        )
    cut = policy.sequence_packing.enabled or megatron.layout.cp > 1
    if cut and policy.precision != "bfloat16":
        raise ConfigError(
            f"{option}, policy.precision is {policy.precision!r}, and sequences are packed or cut: their attention is one "
            "kernel in bfloat16 alone; set policy.precision=bfloat16, or cuda_graphs=false"
        )
