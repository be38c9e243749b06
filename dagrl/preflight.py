"""Everything that can be wrong with a run and be known before any actor starts, and what was read on the way.

`preflight` is the first thing a loop calls; `dagrl train --dry-run` calls nothing else. Cheap checks come first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from dagrl.config import Config, GenerationConfig, Json, MegatronConfig, PhasesConfig, PolicyConfig, VllmConfig
from dagrl.data import Example, load_splits
from dagrl.errors import ConfigError, LayoutError
from dagrl.files import require_writable
from dagrl.graph import PhaseGraph
from dagrl.imports import load_attribute, load_callable, load_class, require_package
from dagrl.layout import ParallelLayout
from dagrl.machine import cpu_count, gpu_count, gpus_per_worker
from dagrl.metrics import VALIDATION
from dagrl.model_init import load_tokenizer, model_description
from dagrl.phase import Phase, Role, group_transports, methods_of
from dagrl.record import RunPaths, require_extras
from dagrl.tokenization import Demonstration, Prompt, encode_demonstrations, encode_prompts, keep_fitting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

WORKERS_PER_CORE = 8
"""Workers allowed for each CPU core on a machine without GPUs, unless `cluster.max_workers` says otherwise."""

SFT_PHASES = ("sft_step", "evaluate")
GRPO_PHASES = ("train_step", "logprobs", "reference_logprobs", "generate", "refit")
KV_PHASES = ("calibrate_kv_scales",)
OFFLOAD_PHASES = ("logprob_inference_prep", "training_prep")
OVERLAP_PHASES = ("accumulate_gradients",)


@dataclass(frozen=True)
class Inputs:
    """What a loop needs of the disk: the tokenizer, the model's `config.json`, and tokenized examples.

    Prompts are empty for algorithm `sft`, demonstrations for `grpo` without an SFT phase.
    """

    tokenizer: PreTrainedTokenizerFast
    hf_config: Mapping[str, Json]
    demonstrations: list[Demonstration]
    validation_demonstrations: list[Demonstration]
    prompts: list[Prompt]
    validation_prompts: list[Prompt]


def preflight(config: Config) -> Inputs:
    """Check the configuration against the machine, the model, the workers, the phases and the data; read the data.

    Raises a UserError that says what to change.
    """
    check_settings(config)
    require_extras(config.logger)
    workers = worker_classes(config)
    _check_machine(config)
    _check_outputs(config)
    trace_phases(config, workers)
    if config.algorithm == "grpo":
        _check_function(config.reward.function, "reward.function")
        if config.environment.function is not None:
            _check_function(config.environment.function, "environment.function")
    tokenizer = load_tokenizer(config.policy)
    hf_config = model_description(config.policy, len(tokenizer))
    _check_model(config, hf_config, workers)
    inputs = _read_data(config, tokenizer, hf_config)
    _check_metric(config, inputs)
    return inputs


def check_settings(config: Config) -> None:
    """What the configuration alone says that cannot be, on whatever machine. Raises a UserError that says what to change."""
    _check_choices(config)
    _check_batches(config)
    _check_off_policy(config)
    _check_on_policy(config)
    _check_overlap(config)
    _check_colocated(config)
    _check_shared_gpus(config)


def limit_steps(config: Config, inputs: Inputs) -> Config:
    """The configuration with `max_num_steps` of SFT and GRPO no larger than their `max_num_epochs` take."""
    sft, grpo = config.sft, config.grpo
    if sft.max_num_epochs is not None and inputs.demonstrations:
        steps = math.ceil(sft.max_num_epochs * len(inputs.demonstrations) / config.policy.train_global_batch_size)
        sft = sft.model_copy(update={"max_num_steps": min(sft.max_num_steps, steps)})
    if grpo.max_num_epochs is not None and inputs.prompts:
        steps = math.ceil(grpo.max_num_epochs * len(inputs.prompts) / grpo.num_prompts_per_step)
        grpo = grpo.model_copy(update={"max_num_steps": min(grpo.max_num_steps, steps)})
    return config.model_copy(update={"sft": sft, "grpo": grpo})


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


def is_colocated(config: Config) -> bool:
    """Whether train and generation workers share their GPUs (`policy.generation.colocated.enabled`)."""
    generation = config.policy.generation
    return config.algorithm == "grpo" and generation is not None and generation.colocated.enabled


def worker_classes(config: Config) -> dict[str, type]:
    """The worker class of each group. A class may name the top-level packages it imports later in `requires`."""
    keys = {"train": ("policy.worker", config.policy.worker)}
    if config.algorithm == "grpo":
        keys["generation"] = ("policy.generation.worker", generation_config(config).worker)
    classes = {role: load_class(path, key) for role, (key, path) in keys.items()}
    for role, worker in classes.items():
        for package in getattr(worker, "requires", ()):
            require_package(package, keys[role][0])
    return classes


def _check_function(path: str, key: str) -> None:
    """A function may name the top-level packages that it imports when it is called in `requires`, as worker classes do."""
    for package in getattr(load_callable(path, key), "requires", ()):
        require_package(package, key)


def trace_phases(config: Config, workers: Mapping[str, type]) -> dict[str, PhaseGraph]:
    """The graph of every phase that the algorithm replays, by its key in `phases`.

    Raises GraphError for a phase that its workers cannot run, ConfigError for an import path that is no phase.
    """
    transports = group_transports(gpus_per_worker(config.cluster))
    roles = {role: Role(role, layout, methods_of(workers[role]), transports) for role, layout in layouts(config).items()}
    return {key: load_phase(config.phases, key).trace(roles, config.executor_cfg.arity) for key in _phase_keys(config)}


def load_phase(phases: PhasesConfig, key: str) -> Phase:
    """The phase at the import path `phases.<key>`."""
    path = cast(str, getattr(phases, key))
    found = load_attribute(path, f"phases.{key}")
    if not isinstance(found, Phase):
        raise ConfigError(f"phases.{key}: {path!r} is a {type(found).__name__}; expected: a function decorated with @phase")
    return found


def bucket_widths(policy: PolicyConfig) -> tuple[int, ...]:
    """Token widths that phases are warmed up at, ascending."""
    return tuple(sorted(set(policy.sequence_buckets))) or (policy.max_total_sequence_length,)


def _phase_keys(config: Config) -> Iterable[str]:
    if config.algorithm == "sft":
        return SFT_PHASES
    more: tuple[str, ...] = OFFLOAD_PHASES if config.policy.offload_optimizer_for_logprob else ()
    more += OVERLAP_PHASES if config.grpo.overlap_training else ()
    more += KV_PHASES if generation_config(config).vllm_cfg.kv_cache_dtype == "fp8" else ()
    return (*(SFT_PHASES if config.sft.max_num_steps else ()), *GRPO_PHASES, *more)


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
        length = generation_config(config).vllm_cfg.max_model_len
        if length is not None and length < widest:
            raise ConfigError(
                f"policy.generation.vllm_cfg.max_model_len is {length}, shorter than the largest bucket, {widest} tokens"
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


def _check_metric(config: Config, inputs: Inputs) -> None:
    """Other names of `checkpointing.metric_name` are known when a step has metrics (`Session.metric`)."""
    name = config.checkpointing.metric_name or ""
    held_out = inputs.validation_prompts if config.algorithm == "grpo" else inputs.validation_demonstrations
    if name.startswith(VALIDATION) and not held_out:
        raise ConfigError(
            f"checkpointing.metric_name is {name!r}, but nothing is held out for validation; set data.val_fraction, "
            "data.val_path or data.val_split, or rank by a metric of training"
        )


def _check_batches(config: Config) -> None:
    dp, size = layouts(config)["train"].dp, config.policy.train_global_batch_size
    if size % dp:
        raise LayoutError(
            f"policy.train_global_batch_size {size} is not divisible by data_parallel_size {dp}; "
            f"choose {size // dp * dp or dp} or {-(-size // dp) * dp} sequences, or another data_parallel_size"
        )
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    if config.algorithm == "grpo" and samples % size:
        raise LayoutError(
            f"grpo.num_prompts_per_step {config.grpo.num_prompts_per_step} x num_generations_per_prompt "
            f"{config.grpo.num_generations_per_prompt} = {samples} samples are not divisible into optimizer steps of "
            f"policy.train_global_batch_size {size}; choose a divisor of {samples}"
        )


def _check_off_policy(config: Config) -> None:
    """Settings of asynchronous training and of the corrections for it that contradict each other."""
    loss, settings = config.loss_fn, config.grpo.async_grpo
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
    if config.algorithm != "grpo":
        return
    generation = generation_config(config)
    if loss.use_importance_sampling_correction and (generation.top_p < 1 or (generation.top_k or 0) > 0):
        logger.warning(
            "policy.generation.top_p %g or top_k %s cuts the distribution that is sampled from, and the log-probabilities "
            "kept are of what is left; the train workers' are of the whole. The weights of "
            "loss_fn.use_importance_sampling_correction are then too small for every token: set top_p=1 and top_k=null",
            generation.top_p,
            generation.top_k,
        )
    if not settings.enabled:
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
    if settings.max_trajectory_age_steps and not loss.use_importance_sampling_correction:
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
    samples = config.grpo.num_prompts_per_step * config.grpo.num_generations_per_prompt
    size = config.policy.train_global_batch_size
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


def _check_outputs(config: Config) -> None:
    paths = RunPaths.of(config)
    require_writable(paths.directory, f"output_dir {config.output_dir}")
    if config.checkpointing.enabled and config.checkpointing.checkpoint_dir is not None:
        require_writable(paths.checkpoints, f"checkpointing.checkpoint_dir {config.checkpointing.checkpoint_dir}")


def _check_machine(config: Config) -> None:
    """More workers than this machine holds; a cluster that runs already is asked when it is joined."""
    groups = layouts(config)
    together = max if is_colocated(config) and gpus_per_worker(config.cluster) else sum
    workers = together(layout.world_size for layout in groups.values())
    sizes = " + ".join(f"{layout.world_size} {role} ({layout.describe()})" for role, layout in groups.items())
    most, reason = _most_workers(config)
    if most is not None and workers > most:
        raise LayoutError(f"the layouts ask for {workers} workers, {sizes}, but {reason}; choose smaller layouts")


def _most_workers(config: Config) -> tuple[int | None, str]:
    cluster = config.cluster
    if cluster.max_workers is not None:
        return cluster.max_workers, f"cluster.max_workers is {cluster.max_workers}"
    if cluster.address is not None:
        return None, ""
    gpus = gpu_count() if cluster.num_gpus is None else cluster.num_gpus
    share = 1.0 if cluster.gpus_per_worker is None else cluster.gpus_per_worker
    if gpus and share:
        return int(gpus / share), f"this machine has {gpus} GPUs and a worker takes {share:g} (cluster.gpus_per_worker)"
    cores = cluster.num_cpus or cpu_count()
    most = cores * WORKERS_PER_CORE
    return most, f"{cores} CPU cores hold {most} ({WORKERS_PER_CORE} a core, or set cluster.max_workers)"


def _check_model(config: Config, hf_config: Mapping[str, Json], workers: Mapping[str, type]) -> None:
    """What the model allows, and what a worker class says in its static `check(config, hf_config)`, if it has one."""
    positions, widest = hf_config.get("max_position_embeddings"), bucket_widths(config.policy)[-1]
    if isinstance(positions, int) and positions < widest:
        raise ConfigError(
            f"the model has {positions} positions (max_position_embeddings), but the largest bucket {widest} tokens"
        )
    for role, worker in workers.items():
        try:
            getattr(worker, "check", _accept)(config, hf_config)
        except (ConfigError, LayoutError) as error:
            raise type(error)(f"{role} workers: {error}") from error


def _accept(config: Config, hf_config: Mapping[str, Json]) -> None:
    """The check of a worker class that has none."""


def _read_data(config: Config, tokenizer: PreTrainedTokenizerFast, hf_config: Mapping[str, Json]) -> Inputs:
    splits = load_splits(config.data)
    generates, learns = config.algorithm == "grpo", config.algorithm == "sft" or config.sft.max_num_steps > 0
    validation_prompts = splits.validation[: config.grpo.max_val_samples] if generates else ()
    validation = splits.validation[: config.sft.max_val_samples] if learns else ()
    return Inputs(
        tokenizer,
        hf_config,
        _demonstrations(config, tokenizer, splits.demonstrations if learns else ()),
        _demonstrations(config, tokenizer, validation),
        _prompts(config, tokenizer, splits.train if generates else ()),
        _prompts(config, tokenizer, validation_prompts),
    )


def _demonstrations(config: Config, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[Demonstration]:
    room = bucket_widths(config.policy)[-1]
    rows = encode_demonstrations(examples, tokenizer, config.data.assistant_turns)
    return keep_fitting(rows, room, config.data.too_long, "the largest bucket")


def _prompts(config: Config, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> list[Prompt]:
    if not examples:
        return []
    new = generation_config(config).max_new_tokens
    room = bucket_widths(config.policy)[-1] - new
    limit = f"the largest bucket less policy.generation.max_new_tokens {new}"
    return keep_fitting(encode_prompts(examples, tokenizer), room, config.data.too_long, limit)
