"""Facts that follow from the configuration alone (layouts, widths), and checks of settings that contradict each other."""

from __future__ import annotations

import logging
import math
import re
from typing import Literal, Protocol, cast

from dagrl.config import ALGORITHMS, Config, GenerationConfig, MegatronConfig, PolicyConfig, ProcessConfig, VllmConfig
from dagrl.config.roles import CRITIC, TEACHER, own_section, role_config
from dagrl.errors import ConfigError, LayoutError, UserError
from dagrl.imports import load_class, running
from dagrl.runtime.layout import ParallelLayout

logger = logging.getLogger(__name__)

SLOT_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA slots can have (`MaxLoRARanks` in its config/lora.py)."""

MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this (`_MAX_TEMP` in its sampling_params.py) to avoid NaN and infinity."""


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
    _check_colocated(config)
    _check_delta(config)
    _check_shared_gpus(config)
    _check_adapters(config)
    _check_cuda_graphs(config)
    _check_communication(config)
    _check_models(config)
    _check_experts(config)


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


def samples_per_step(config: Config) -> int:
    """Returns the samples of a generated batch: prompts times generations."""
    return config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt


def rows_per_sample(config: Config) -> int:
    """Returns the rows of a batch that each sample has: one, or the conversations of an agent, with empty rows for fewer."""
    return config.environment.max_conversations if config.environment.agent is not None else 1


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


def sharing_roles(config: Config) -> tuple[str, ...]:
    """Returns the roles whose workers are on the train workers' GPUs, these among them; empty if there are none."""
    sections = {role: own_section(config, role) for role in model_roles(config)}
    others = [role for role, section in sections.items() if section is not None and section.colocated]
    others += ["generation"] if is_colocated(config) else []
    return ("train", *others) if others else ()


def shares_logprobs(config: Config) -> bool:
    """Whether every train shard holds the log-probabilities of all rows, as any of them may train on a row."""
    return config.grpo.overlap_logprobs


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


def _check_colocated(config: Config) -> None:
    if is_colocated(config) and config.grpo.async_grpo.enabled:
        raise ConfigError(
            "policy.generation.colocated.enabled and grpo.async_grpo.enabled are both true, but colocated workers take "
            "turns on their GPUs; set one to false"
        )
    if is_colocated(config) and config.grpo.overlap_logprobs:
        raise ConfigError(
            "policy.generation.colocated.enabled and grpo.overlap_logprobs are both true, but colocated workers take turns "
            "on their GPUs; set one to false"
        )
    kept = config.policy.reference_weights == "device" and uses_reference(config)
    if takes_turns(config) and kept:
        raise ConfigError(
            "policy.generation.colocated.enabled is true, but policy.reference_weights is 'device', which keeps the "
            "reference policy on the GPU during generation; set policy.reference_weights to host, or "
            "policy.generation.colocated.exchange to never"
        )


def _check_adapters(config: Config) -> None:
    """Checks that vLLM's LoRA slots can hold what a refit of adapters alone sends."""
    if not sends_adapters(config):
        return
    peft, generation = config.policy.megatron_cfg.peft, generation_config(config)
    problems = {
        "policy.megatron_cfg.peft.use_dora is true, but vLLM's LoRA slots have no row norms": peft.use_dora,
        f"policy.megatron_cfg.peft.dim is {peft.dim}, but vLLM's LoRA slots have at most {SLOT_RANKS[-1]}": (
            peft.dim > SLOT_RANKS[-1]
        ),
        "policy.generation.vllm_cfg.precision is fp8, but vLLM would quantize the base weights that stay as loaded": (
            generation.vllm_cfg.precision == "fp8"
        ),
        "policy.generation.vllm_cfg.kv_cache_dtype is fp8, whose scales come with the weights": has_fp8_kv_cache(config),
        "policy.generation.colocated.sleep_level is 2, which drops base weights that no refit brings back": (
            generation.colocated.enabled and generation.colocated.sleep_level == 2
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise ConfigError(f"{problem}; change it, or set policy.megatron_cfg.peft.refit=merged")


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
    section, own = own_section(config, role), role_config(config, role)
    if section is not None and section.colocated and is_colocated(config):
        raise ConfigError(
            f"{role}.colocated and policy.generation.colocated.enabled are both true, but only two groups can share GPUs; "
            "set one to false"
        )
    try:
        _check_microbatches(own.policy, bucket_widths(own.policy)[-1])
        _check_communication(own)
        _check_cuda_graphs(own)
        if role == CRITIC:
            _check_batches(own)
            _check_rates(own)
    except UserError as error:
        raise type(error)(re.sub(r"\bpolicy\.(?!generation)", f"{role}.", str(error))) from error


def _check_delta(config: Config) -> None:
    if config.refit.delta == "off":
        return
    if is_colocated(config):
        raise ConfigError(
            "refit.delta is lossless and policy.generation.colocated.enabled is true: copies inside a GPU are faster than "
            "comparing, and the kept copy would take its memory. Set refit.delta=off"
        )
    if config.refit.cuda_graph is True:
        raise ConfigError(
            "refit.delta is lossless and refit.cuda_graph is true, but a graph sends the same bytes each time; set "
            "refit.cuda_graph=auto, or refit.delta=off"
        )


def _check_shared_gpus(config: Config) -> None:
    """Checks that workers of one group have a GPU each: NCCL cannot connect two processes on one GPU."""
    share = config.cluster.gpus_per_worker
    for role, layout in layouts(config).items() if share is not None and 0 < share < 1 else ():
        if layout.world_size > 1:
            raise LayoutError(
                f"cluster.gpus_per_worker is {share:g}, so several of the {layout.world_size} {role} workers "
                f"({layout.describe()}) share a GPU, where NCCL cannot connect them; set it to 1, or use one {role} worker"
            )


def _check_communication(config: Config) -> None:
    """Checks that the requested overlap of communication and computation is possible."""
    megatron = config.policy.megatron_cfg
    ddp, key = megatron.distributed_data_parallel_config, "policy.megatron_cfg.distributed_data_parallel_config"
    if ddp.overlap_param_gather and not (ddp.overlap_grad_reduce and megatron.optimizer.use_distributed_optimizer):
        raise ConfigError(
            f"{key}.overlap_param_gather is true, which needs {key}.overlap_grad_reduce=true and "
            "policy.megatron_cfg.optimizer.use_distributed_optimizer=true; set both, or set overlap_param_gather=false"
        )
    if ddp.overlap_grad_reduce and megatron.cuda_graphs:
        raise ConfigError(
            f"{key}.overlap_grad_reduce and policy.megatron_cfg.cuda_graphs are both true: a replayed backward pass cannot "
            "start reductions. Set one to false"
        )
    if megatron.tp_comm_overlap:
        raise ConfigError(
            "policy.megatron_cfg.tp_comm_overlap is true, which needs Transformer Engine's linear layers. Train workers "
            "build Megatron's local layers, which always overlap the reduction of input gradients with weight gradients. "
            "Set tp_comm_overlap=false"
        )


def _check_cuda_graphs(config: Config) -> None:
    """Checks that a microbatch's forward and backward pass can be captured as CUDA graphs."""
    policy, megatron = config.policy, config.policy.megatron_cfg
    if not megatron.cuda_graphs:
        return
    option = "policy.megatron_cfg.cuda_graphs is true"
    if megatron.layout.pp > 1:
        raise ConfigError(
            f"{option}, but pipeline_model_parallel_size is {megatron.layout.pp}: a pipeline has several microbatches in "
            "flight, a graph replays one. Set cuda_graphs=false, or pipeline_model_parallel_size=1"
        )
    if megatron.activation_checkpointing:
        raise ConfigError(
            f"{option}, and so is activation_checkpointing, which reads the random generator's state: a graph cannot "
            "capture that. Set one to false"
        )
    if takes_turns(config):
        raise ConfigError(
            f"{option}, and so is policy.generation.colocated.enabled: weights that leave the GPU return at other "
            "addresses, and graphs would have to be captured again. Set policy.generation.colocated.exchange=never, or "
            "cuda_graphs=false"
        )
    varlen = policy.sequence_packing.enabled or megatron.layout.cp > 1
    if varlen and policy.precision != "bfloat16":
        raise ConfigError(
            f"{option} and policy.precision is {policy.precision!r}, but with sequence packing or context parallelism "
            "attention is one kernel in bfloat16 only; set policy.precision=bfloat16, or cuda_graphs=false"
        )


def _check_experts(config: Config) -> None:
    megatron = config.policy.megatron_cfg
    kind, weight = megatron.moe_router_load_balancing_type, megatron.moe_aux_loss_coeff
    if (kind == "none") != (weight == 0):
        raise ConfigError(
            f"policy.megatron_cfg.moe_router_load_balancing_type is {kind!r}, and moe_aux_loss_coeff {weight:g}; for a "
            "load-balancing loss set both, such as seq_aux_loss and 0.001, or else none and 0"
        )
    if generates(config) and config.grpo.overlap_training and (weight or megatron.moe_z_loss_coeff):
        raise ConfigError(
            "grpo.overlap_training is true, and the router has a loss (policy.megatron_cfg.moe_aux_loss_coeff, "
            "moe_z_loss_coeff): its share of a step needs the tokens of the whole batch, which early gradients do not know. "
            "Set overlap_training=false, or both coefficients to 0"
        )
    if config.policy.router_replay and not generates(config):
        raise ConfigError(
            f"policy.router_replay is true, but algorithm {config.algorithm!r} generates nothing to replay; set it to false"
        )
