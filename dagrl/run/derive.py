"""Derives the keys that a configuration leaves open from the machine, the model and the data, each with its reason.

The backend is Megatron-Core for model types that it trains, and FSDP2 for all others.

A key that the user sets keeps its value. The run logs what was derived and saves it in `config.yaml`. Derived keys have the
field's default only where nothing derives them: in code that takes a `Config` without `preflight`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dagrl.config import Config, FsdpLayoutConfig, GenerationConfig, Json, MegatronConfig, VllmConfig
from dagrl.config.plan import RunPlan
from dagrl.config.roles import CRITIC, model_section, section_key
from dagrl.config.settings import LEAST_SHARED, bucket_widths, generation_config, least_shared, samples_per_step, width_key
from dagrl.data.chat import Chat
from dagrl.data.hugging_face import is_hub_id
from dagrl.errors import ConfigError
from dagrl.imports import load_attribute, load_class
from dagrl.machine import gpus, host_memory
from dagrl.rl.algorithm import Algorithm, algorithm_of
from dagrl.rl.preferences import gives_scores
from dagrl.run.cluster import gpus_here, gpus_per_worker
from dagrl.run.memory import Decoder, engine_memory, run_memory, saved_bytes, state_bytes, train_memory, weight_count
from dagrl.run.model import language_keys
from dagrl.run.step_time import GPUS, Rows, generated_rows, train_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

MEGATRON, FSDP, ENGINE = "policy.megatron_cfg", "policy.fsdp_cfg", "policy.generation.vllm_cfg"
ROLLOUT = "policy.generation"

NEW_TOKENS = 1024  # longest completion, if neither it nor the longest sequence is set
PROMPT_TOKENS = 1024  # room for prompts until the data are read
SFT_SEQUENCES = 32  # sequences of an SFT step

LAYOUT = (
    *(f"{MEGATRON}.{name}" for name in MegatronConfig.model_fields if name.endswith("_size")),
    *(f"{FSDP}.{name}" for name in FsdpLayoutConfig.model_fields),
    *(f"{ENGINE}.{name}" for name in VllmConfig.model_fields if name.endswith("_parallel_size")),
    f"{ROLLOUT}.colocated.enabled",
)

GPU_SECONDS = {"start_s": 600.0, "warmup_s": 600.0, "replay_s": 600.0, "collective_s": 300.0, "checkpoint_s": 600.0}

CACHE_BLOCK = 16  # tokens of a block of vLLM's KV cache

START_SHARE = 0.8
"""Largest part of a GPU that colocated roles are planned to take when they start together, or at their peaks."""

LEAST_CACHE = 1 << 30  # bytes of the smallest derived KV cache of a GPU
MOST_TOKENS = 16384  # tokens of a microbatch that keep a GPU busy; more would only take memory

IMAGE_PARTS = 3
"""Times what the layers of a text save, for a token of an image in a model with a tower: Qwen3-VL-2B's takes twice that."""

ROUND = 64  # lengths from data are rounded up to a multiple of this many tokens

WORKERS: Mapping[str, Mapping[str, str]] = {
    "megatron": {
        "policy": "dagrl.workers.megatron:MegatronWorker",
        "value": "dagrl.workers.megatron:MegatronValueWorker",
        "teacher": "dagrl.workers.megatron:MegatronTeacherWorker",
    },
    "fsdp": {
        "policy": "dagrl.workers.fsdp:FsdpWorker",
        "value": "dagrl.workers.fsdp:FsdpValueWorker",
        "teacher": "dagrl.workers.fsdp:FsdpTeacherWorker",
    },
}
"""The worker classes of each backend, by the kind of model."""


@dataclass
class Derived:
    """A configuration whose open keys are being filled in, and the reason of each value.

    `gpu_bytes`: the memory of a GPU; 0: that of the smallest one here.
    """

    config: Config
    reasons: dict[str, str] = field(default_factory=dict)
    gpu_bytes: int = 0
    algorithm: Algorithm = field(init=False)

    def __post_init__(self) -> None:
        self.algorithm = algorithm_of(self.config)

    @property
    def generates(self) -> bool:
        """Whether the algorithm learns from completions that generation workers make."""
        return self.algorithm.learns_from == "samples"

    @property
    def colocated(self) -> bool:
        """Whether train and generation workers share their GPUs, as far as is known by now."""
        generation = self.config.policy.generation
        return self.generates and generation is not None and generation.colocated.enabled

    @property
    def lengths_open(self) -> bool:
        """Whether the longest sequence follows from the data."""
        return self.open("policy.max_total_sequence_length") and not self.config.policy.sequence_buckets

    def open(self, *keys: str) -> bool:
        """Returns whether the user left all of `keys` open."""
        return all(key in self.reasons or not self.config.is_set(key) for key in keys)

    def set(self, key: str, value: Json | date, reason: str) -> None:
        """Sets `key` if it is open."""
        if self.open(key):
            self.config = self.config.with_keys({key: value})
            self.reasons[key] = reason


def derive_from_machine(config: Config, gpu_bytes: int = 0) -> Derived:
    """Fills in what follows from the configuration and the machine. Lengths are provisional until the data are read."""
    derived = Derived(config, gpu_bytes=gpu_bytes)
    if config.policy.generation is None and derived.generates:
        derived.config = config.with_keys({ROLLOUT: GenerationConfig()})
    for key, value, reason in choose_backends(derived.config, derived.algorithm):
        derived.config = derived.config.with_keys({key: value})
        derived.reasons[key] = reason
    if gpus_per_worker(config.cluster):
        _use_gpus(derived)
    _set_rates(derived)
    _set_batch(derived)
    _set_lengths(derived)
    return derived


def derive_from_data(
    derived: Derived, rows: Iterable[Sized], prompts: Iterable[Sized], hf_config: Mapping[str, Json], weight_bytes: int
) -> None:
    """Fills in lengths from tokenized examples, and microbatches from the GPU's memory.

    `weight_bytes`: bytes of the checkpoint, 0 if unknown.
    """
    rows, prompts = [*rows], [*prompts]
    _fit_lengths(derived, rows, prompts, hf_config)
    on_gpus, packing = gpus_per_worker(derived.config.cluster), "policy.sequence_packing"
    if on_gpus and derived.config.policy.sequence_packing.enabled:
        _leave_out(derived, f"{packing}.enabled", "unpackable", "sequences of a row would see each other through", hf_config)
    if least_shared(derived.config.policy) is not None:
        _leave_out(derived, f"{packing}.shared_prefix", "unshared", "the model has", hf_config)
    if on_gpus:
        _fit_microbatches(derived, rows, prompts, hf_config, weight_bytes)
        if derived.colocated:
            _fit_shared_cache(derived, hf_config, weight_bytes)
            _start_together(derived, hf_config, weight_bytes)
    elif derived.generates:
        _fit_host_cache(derived, hf_config)


def derive_chat(derived: Derived, has_template: bool) -> None:
    """Sets whether plain prompts become conversations. Raises ConfigError for a system prompt that nothing would show."""
    what = "a" if has_template else "no"
    derived.set("data.apply_chat_template", has_template, f"the tokenizer has {what} chat template")
    data = derived.config.data
    if data.apply_chat_template and not has_template:
        raise ConfigError(
            "data.apply_chat_template is true, but the tokenizer has no chat template; set policy.tokenizer.chat_template, "
            "or data.apply_chat_template=false"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        raise ConfigError(
            "data.system_prompt is set, but only a chat template can show it; set data.apply_chat_template=true (and "
            "policy.tokenizer.chat_template, if the tokenizer has none), or write the text into the prompts"
        )


def derive_date(derived: Derived, started: date | None) -> None:
    """Sets the date that the chat template writes: today's, or that of the run which is resumed."""
    which = "keeps that of its start" if started else "starts today"
    derived.set("policy.tokenizer.date", started or date.today(), f"the chat template writes a date, and the run {which}")


def derive_images(derived: Derived, shows: str) -> None:
    """Says that the data have images: `shows` is a row that does. Raises ConfigError if the configuration denies it."""
    derived.set("data.images.enabled", True, "the data have images")
    if not derived.config.data.images.enabled:
        raise ConfigError(f"data.images.enabled is false, but {shows} has images; leave it out, or remove the images")


def derive_stops(derived: Derived, chat: Chat, ends: Mapping[str, Iterable[int]], *, shown: bool) -> None:
    """Adds the tokens that end a completion: `ends` by where they come from, and if the chat template is `shown`, what ends
    the turns that it renders.

    Raises ConfigError if the template ends turns with a text that no token or stop string is.
    """
    config, named = generation_config(derived.config), dict[int, list[str]]()
    sources = {"configured": config.stop_token_ids, **ends}
    if shown:
        sources["ends turns of the chat template"] = chat.stops
        written = chat.end.text.strip()
        strings = {stop.strip() for stop in config.stop_strings}
        parts = sorted(stop for stop in strings if stop and stop != written and stop in written)
        if written and not chat.end.tokens and (parts or written not in strings):
            found = f"but {ROLLOUT}.stop_strings has {' and '.join(map(repr, parts))}, a part of it" if parts else ""
            raise ConfigError(
                f"the chat template ends assistant turns with {written!r}, which is not a token of the tokenizer, "
                f"{found or 'so generation would not stop there'}; use the tokenizer that belongs to the template, or set "
                f"{ROLLOUT}.stop_strings to [{written!r}]"
            )
        if not written and not chat.end.tokens:
            logger.warning(
                "the chat template writes no end after an assistant turn, so generation ends only with %s",
                " or ".join(map(repr, chat.tokenizer.convert_ids_to_tokens([*chain(*ends.values())]))),
            )
    for source, tokens in sources.items():
        for token in tokens:
            named.setdefault(token, []).append(source)
    _check_stop_strings(config.stop_strings, chat.tokenizer, named)
    key = f"{ROLLOUT}.stop_token_ids"
    derived.config = derived.config.with_keys({key: tuple(named)})
    texts = (f"{token} {chat.tokenizer.convert_ids_to_tokens(token)!r}: {', '.join(why)}" for token, why in named.items())
    derived.reasons[key] = "; ".join(texts)


def _check_stop_strings(strings: Sequence[str], tokenizer: PreTrainedTokenizerFast, stops: Container[int]) -> None:
    """Raises ConfigError for a string with a special token, which vLLM leaves out of texts, unless it is one of `stops`."""
    for number, token in tokenizer.added_tokens_decoder.items():
        found = [text for text in strings if token.special and token.content in text]
        if found and not (found == [token.content] and number in stops):
            raise ConfigError(
                f"{ROLLOUT}.stop_strings has {found[0]!r}, but {token.content!r} is a special token, which is left out of "
                f"the texts in which they are looked for; remove it, or add {number} to {ROLLOUT}.stop_token_ids"
            )


def derive_steps(derived: Derived, demonstrations: int = 0, prompts: int = 0, pairs: int = 0) -> None:
    """Sets steps to `max_num_epochs` passes over the examples, or to one. Warns of fewer than a step takes."""
    for section, rows in (("sft", demonstrations), ("grpo", prompts), ("preference", pairs)):
        if rows:
            size = _rows_per_step(derived.config, section)
            epochs, steps = getattr(derived.config, section).max_num_epochs or 1, epoch_steps(derived.config, section, rows)
            passes = f"{epochs} pass{'es' if epochs > 1 else ''} over {rows} examples"
            derived.set(f"{section}.max_num_steps", steps, f"{passes}, {size} a step")
            if rows < size and getattr(derived.config, section).max_num_steps:
                key = "grpo.num_prompts_per_step" if section == "grpo" else "policy.train_global_batch_size"
                logger.warning(
                    "%d examples are fewer than the %d of a step of %s, which repeats some; add examples, or lower %s",
                    rows,
                    size,
                    section,
                    key,
                )


def epoch_steps(config: Config, section: str, rows: int) -> int:
    """Returns the steps of `max_num_epochs` passes over `rows` examples, or of one."""
    return math.ceil((getattr(config, section).max_num_epochs or 1) * rows / _rows_per_step(config, section))


def _rows_per_step(config: Config, section: str) -> int:
    return config.grpo.num_prompts_per_step if section == "grpo" else config.policy.train_global_batch_size


def _use_gpus(derived: Derived) -> None:
    rolls_out = derived.generates
    derived.set("policy.precision", "bfloat16", "GPUs")
    if derived.open("policy.worker"):
        derived.set("policy.sequence_packing.enabled", True, "GPUs: no padding")
    if derived.config.policy.backend == "fsdp" and derived.config.policy.fsdp_cfg.context_parallel_size == 1:
        derived.set(f"{FSDP}.torch_compile", True, "GPUs: fewer and larger kernels")
    for name, seconds in GPU_SECONDS.items():
        derived.set(f"timeouts.{name}", seconds, "GPUs: models and batches are large")
    _use_all_gpus(derived)
    if not rolls_out:
        return
    derived.set(f"{ENGINE}.enforce_eager", False, "GPUs: CUDA graphs")
    if derived.open(f"{ENGINE}.kv_cache_memory_bytes"):
        derived.set(f"{ENGINE}.kv_cache_memory_bytes", None, "GPUs: what gpu_memory_utilization leaves")
        if not derived.colocated:
            part = min(1.0, gpus_per_worker(derived.config.cluster))
            own = "a GPU of its own" if part == 1 else f"{part:g} of a GPU"
            derived.set(f"{ENGINE}.gpu_memory_utilization", round(0.85 * part, 3), f"the engine has {own}")
    engines = generation_config(derived.config).vllm_cfg.data_parallel_size
    share = min(512, math.ceil(samples_per_step(derived.config) / engines))
    derived.set(f"{ENGINE}.max_num_seqs", share, "GPUs: an engine's share of a batch, at most 512")


def _use_all_gpus(derived: Derived) -> None:
    """Puts a replica, and an engine next to it, on every GPU of this machine, unless the user chose a layout."""
    config, rolls_out = derived.config, derived.generates
    if config.cluster.address is not None or config.cluster.gpus_per_worker is not None or not derived.open(*LAYOUT):
        return
    here = gpus_here(config.cluster)
    if not derived.open("policy.worker", f"{ROLLOUT}.worker") or (rolls_out and not _may_share(derived)):
        return
    count = _replicas(derived, here)
    where = f"{here} GPU{'s' if here > 1 else ''} on this machine" + ("" if count == here else ", and the size of a batch")
    if count > 1:
        fsdp = config.policy.backend == "fsdp"
        derived.set(f"{FSDP if fsdp else MEGATRON}.data_parallel_size", count, where)
        if not fsdp:
            derived.set(f"{MEGATRON}.use_distributed_optimizer", True, "several data-parallel ranks")
        if rolls_out:
            derived.set(f"{ENGINE}.data_parallel_size", count, where)
    if rolls_out and (count > 1 or here == 1):
        derived.set(f"{ROLLOUT}.colocated.enabled", True, where)


def _replicas(derived: Derived, most: int) -> int:
    """Returns the most replicas, up to `most`, that divide a batch of the optimizer."""
    config = derived.config
    if not derived.open("policy.train_global_batch_size"):
        size = config.policy.train_global_batch_size
    elif derived.generates:
        size = samples_per_step(config)
    else:
        return most  # the size follows from the replicas
    return max(count for count in range(1, most + 1) if size % count == 0)


def _may_share(derived: Derived) -> bool:
    """Returns whether train and generation workers may take turns on their GPUs, and no other roles need some."""
    config, algorithm = derived.config, derived.algorithm
    reference_stays = config.policy.reference_weights == "device" and "reference_logprobs" in algorithm.columns
    others = algorithm.critic or not all(model.colocated for model in config.models.values())
    return not (reference_stays or others or config.grpo.async_grpo.enabled or config.policy.megatron_cfg.cuda_graphs)


def _set_rates(derived: Derived) -> None:
    if not derived.open("policy.optimizer.lr"):
        return
    if derived.config.policy.peft.enabled:
        derived.set("policy.optimizer.lr", 1e-5, "LoRA")
    elif derived.algorithm.learns_from == "preferences":
        rate, what = (1e-5, "a reward model") if gives_scores(derived.algorithm) else (1e-6, "preferences")
        derived.set("policy.optimizer.lr", rate, f"{what}, all weights")
    elif not derived.generates:
        derived.set("policy.optimizer.lr", 1e-5, "SFT of all weights")
    elif _asks_for_sft(derived):
        derived.set("sft.lr", 1e-5, "SFT of all weights")


def _asks_for_sft(derived: Derived) -> bool:
    return not derived.open("sft.max_num_steps") or derived.config.sft.max_num_epochs is not None


def _set_batch(derived: Derived) -> None:
    config = derived.config
    if derived.generates:
        derived.set("policy.train_global_batch_size", samples_per_step(config), "one optimizer step for each batch")
        one_step = derived.config.policy.train_global_batch_size == samples_per_step(config)
        if gpus_per_worker(config.cluster) and config.algorithm == "grpo" and one_step:
            derived.set("loss_fn.force_on_policy_ratio", True, "GPUs: one optimizer step for each batch, so ratios are 1")
        if not _asks_for_sft(derived):
            derived.set("sft.max_num_steps", 0, "GRPO starts from the model as it is")
    else:
        replicas = config.policy.train_layout.dp
        size = math.ceil(SFT_SEQUENCES / replicas) * replicas
        derived.set("policy.train_global_batch_size", size, "the usual size")


def _set_lengths(derived: Derived) -> None:
    policy, rolls_out = derived.config.policy, derived.generates
    if policy.sequence_buckets:
        derived.set("policy.max_total_sequence_length", max(policy.sequence_buckets), "the largest bucket")
    bounded = derived.config.is_set("policy.max_total_sequence_length")
    if rolls_out and bounded:
        half = max(1, bucket_widths(derived.config.policy)[-1] // 2)
        derived.set(f"{ROLLOUT}.max_new_tokens", half, f"half of {width_key(policy)}")
    elif rolls_out:
        derived.set(f"{ROLLOUT}.max_new_tokens", NEW_TOKENS, "enough for short reasoning")
    if not bounded:
        new = generation_config(derived.config).max_new_tokens if rolls_out else PROMPT_TOKENS
        reason = f"room for {PROMPT_TOKENS} tokens of prompt; a run measures its data"
        derived.set("policy.max_total_sequence_length", new + PROMPT_TOKENS, reason)


def _fit_lengths(derived: Derived, rows: Iterable[Sized], prompts: Iterable[Sized], hf_config: Mapping[str, Json]) -> None:
    if not derived.lengths_open:
        return
    generation, positions = derived.config.policy.generation, language_keys(hf_config).get("max_position_embeddings")
    longest = None if generation is None else generation.vllm_cfg.max_model_len
    limits = [limit for limit in (positions, longest) if isinstance(limit, int) and limit]
    new, room = generation.max_new_tokens if generation is not None else 0, min(limits, default=None)
    if room is not None and new > room // 2 and derived.open(f"{ROLLOUT}.max_new_tokens"):
        new = max(1, room // 2)
        derived.set(f"{ROLLOUT}.max_new_tokens", new, f"half of the {room} tokens that the model has room for")
    if room is not None and new >= room:
        raise ConfigError(
            f"policy.generation.max_new_tokens is {new}, but model and engine have {room} positions: no room for a prompt. "
            "Lower it"
        )
    needs = [max(map(len, rows), default=0), max((len(prompt) + new for prompt in prompts), default=0)]
    width = math.ceil(max(needs) / ROUND) * ROUND
    shortest = width if room is None else room
    if needs[0] >= needs[1]:
        what = f"the longest example has {max(needs)} tokens"
    else:
        what = f"the longest prompt, {max(needs) - new} tokens, and {new} new tokens"
    if width > shortest:
        what += f", but the model has room for {shortest}"
    if width:
        derived.set("policy.max_total_sequence_length", min(width, shortest), what)


def _leave_out(derived: Derived, key: str, check: str, reason: str, hf_config: Mapping[str, Json]) -> None:
    """Sets `key` to false if a check of FSDP's workers names what in the model does not go with it."""
    if derived.config.policy.backend == "fsdp" and derived.open(key, "policy.worker"):
        named = load_attribute(f"dagrl.workers.fsdp.checks:{check}", FSDP)
        if what := cast(Callable[..., str], named)(derived.config, hf_config):
            derived.set(key, False, f"{reason} {what}")


def _fit_microbatches(
    derived: Derived, rows: Sequence[Sized], prompts: Sequence[Sized], hf_config: Mapping[str, Json], weight_bytes: int
) -> None:
    """Sets the tokens of a microbatch to what fits half of the memory that weights, gradients and optimizer leave.

    Pipelines have fewer if the smaller bubble of more microbatches is predicted to make a step shorter.
    """
    config, packing = derived.config, "policy.sequence_packing"
    fsdp = config.policy.backend == "fsdp"
    recompute = f"{FSDP if fsdp else MEGATRON}.activation_checkpointing"
    keys = (f"{packing}.train_mb_tokens", "policy.train_micro_batch_size", recompute)
    part = 1.0 if derived.colocated else min(1.0, gpus_per_worker(config.cluster))
    memory = part * (derived.gpu_bytes or gpu_memory())
    if not (config.policy.sequence_packing.enabled and derived.open(*keys) and memory and weight_bytes):
        return
    layout, width = config.policy.train_layout, config.policy.max_total_sequence_length
    parameters, model = weight_count(hf_config, weight_bytes), Decoder.of(hf_config)
    stays = derived.colocated and generation_config(config).colocated.exchange == "never"
    engine = engine_memory(config, model, memory, parameters).total if stays else 0
    room = 0.5 * (0.9 * memory - engine - sum(state_bytes(config.policy, model, parameters).values()))
    each = saved_bytes(config.policy, model) * (IMAGE_PARTS if model.images else 1)
    fitting = int(room / each * layout.cp) // ROUND * ROUND
    tokens = max(width, min(MOST_TOKENS, fitting))
    reason = f"half of the {max(0.0, 2 * room) / 2**30:.0f} GiB that {parameters / 1e9:.2g} B parameters leave of a GPU"
    exceeds = f"the activations of {width} tokens exceed {reason}" if fitting < width else ""
    best = _pipelined_tokens(derived, rows, prompts, model, 2 * tokens)
    filled = f"enough microbatches for {layout.pp} pipeline stages, by the predicted time of a step"
    reason = filled if best < tokens else "one sequence of the greatest length" if exceeds else reason
    derived.set(f"{packing}.train_mb_tokens", min(tokens, best), reason)
    reason = filled if best < 2 * tokens else "twice those of training: no activations are kept"
    derived.set(f"{packing}.logprob_mb_tokens", best, reason)
    if exceeds:
        kinds: list[str | bool] = ["none", "selective", "full", "offloaded"] if fsdp else [False, True]
        unsure = derived.generates or bool(model.unlike)  # engines take memory, too
        policies = {kind: derived.config.with_keys({recompute: kind}).policy for kind in kinds[unsure:-1]}
        needed = {kind: train_memory(policy, model, memory, parameters).total for kind, policy in policies.items()}
        found = next((kind for kind, size in needed.items() if size <= 0.9 * memory), kinds[-1])
        if found not in ("none", False):
            derived.set(recompute, found, exceeds)


def _pipelined_tokens(derived: Derived, rows: Sequence[Sized], prompts: Sequence[Sized], model: Decoder, most: int) -> int:
    """Returns the tokens of a microbatch, up to `most`, with which an optimizer step is predicted to be shortest.

    A pipeline of `pp` stages is idle for (pp - 1) / (m + pp - 1) of a step of `m` microbatches: for a fifth with 4 (pp - 1),
    and no more are tried, as kernels of fewer tokens are slower than predicted. Completions are taken to have half of
    their limit on average. A row has room for all samples of a prompt whose tokens they share.
    """
    config, policy = derived.config, derived.config.policy
    width, layout, group = bucket_widths(policy)[-1], policy.train_layout, config.grpo.num_generations_per_prompt
    if layout.pp == 1:
        return most
    if derived.generates:
        half = generation_config(config).max_new_tokens / 2
        batch = generated_rows(config, [len(prompt) for prompt in prompts] or [PROMPT_TOKENS], half)
    else:
        lengths = [len(row) for row in rows] or [width]
        batch = Rows(lengths, sum(lengths))
    sides = 2 if derived.algorithm.learns_from == "preferences" else 1
    batch = batch.take(math.ceil(sides * policy.train_global_batch_size / layout.dp))
    computed = batch.tokens * (1 - batch.saved)
    least = max(width, group * computed / len(batch.lengths) if batch.saved >= LEAST_SHARED else 0)
    counts = range(1, 4 * (layout.pp - 1) + 1)
    choices = {min(most, math.ceil(max(least, computed / count) / ROUND) * ROUND) for count in counts}

    def seconds(tokens: int) -> float:
        policy = config.with_keys({"policy.sequence_packing.train_mb_tokens": tokens}).policy
        return sum(train_time(policy, model, GPUS["H200"], batch)[0].values())

    return min(sorted(choices), key=seconds)


def gpu_memory() -> int:
    """Returns the bytes of the smallest GPU here; 0 without one."""
    return min((gpu.memory_mib << 20 for gpu in gpus()), default=0)


def _fit_host_cache(derived: Derived, hf_config: Mapping[str, Json]) -> None:
    """Sets the KV cache on a machine without GPUs: for all sequences at once, at most an eighth of the memory."""
    key, needed = f"{ENGINE}.kv_cache_memory_bytes", _wanted_cache(derived.config, hf_config)
    if not needed or not derived.open(f"{ROLLOUT}.worker", key):
        return
    most = host_memory() // (8 * generation_config(derived.config).vllm_cfg.layout.world_size)
    least = cast(int, VllmConfig.model_fields["kv_cache_memory_bytes"].default)
    reason = "all sequences at once" if needed <= most else "an eighth of the memory of this machine"
    derived.set(key, max(least, min(needed, most)), reason)


def _fit_shared_cache(derived: Derived, hf_config: Mapping[str, Json], weight_bytes: int) -> None:
    """Sets the KV cache of engines that share GPUs with training to what all sequences need at once, if there is room.

    More would not make generation faster, and would leave less that can stay on the GPU in turns of training.
    """
    key, needed = f"{ENGINE}.kv_cache_memory_bytes", _wanted_cache(derived.config, hf_config)
    if not needed or "kv_lora_rank" in hf_config or not derived.open(f"{ROLLOUT}.worker", key):
        return
    memory, model = derived.gpu_bytes or gpu_memory(), Decoder.of(hf_config)
    most = engine_memory(derived.config, model, memory, weight_count(hf_config, weight_bytes)).parts["KV cache"]
    if needed <= most:
        derived.set(key, max(LEAST_CACHE, needed), "GPUs: all sequences at once")


def _start_together(derived: Derived, hf_config: Mapping[str, Json], weight_bytes: int) -> None:
    """Starts engines while training has its memory, if that is known to fit. Raises ConfigError if it cannot be known."""
    config, rollout = derived.config, generation_config(derived.config)
    key, cache = f"{ROLLOUT}.colocated.start_together", rollout.vllm_cfg.kv_cache_memory_bytes
    if rollout.colocated.start_together and cache is None:
        raise ConfigError(
            f"{key} is true, but {ENGINE}.kv_cache_memory_bytes is null: vLLM would take what is free, which changes while "
            "training starts. Set the bytes of the cache, or start_together=false"
        )
    ours = derived.open("policy.worker", f"{ROLLOUT}.worker") and not (derived.algorithm.critic or config.models)
    if cache is None or not (ours and weight_bytes and config.policy.precision == "bfloat16"):
        return
    parameters, model = weight_count(hf_config, weight_bytes), Decoder.of(hf_config)
    memory = derived.gpu_bytes or gpu_memory()
    training = sum(state_bytes(config.policy, model, parameters).values())
    generation = engine_memory(config, model, memory, parameters).total
    if training + generation <= START_SHARE * memory:
        reason = f"{training / 2**30:.0f} GiB of training and {generation / 2**30:.0f} GiB of generation fit the GPU"
        derived.set(key, True, reason)
        _stay(derived, hf_config)


def _stay(derived: Derived, hf_config: Mapping[str, Json]) -> None:
    """Keeps the memory of both roles on the GPUs if their peaks are predicted to fit: they need not be measured in turns."""
    config, gpu = derived.config, derived.gpu_bytes or gpu_memory()
    roles = run_memory(config, RunPlan.of(config), hf_config, gpu)
    predicted = generation_config(config).colocated.start_together and not any(role.unknown for role in roles)
    if not predicted or sum(role.total for role in roles) > START_SHARE * gpu:
        return
    peaks = " and ".join(f"{role.total / 2**30:.0f} GiB of {role.role}" for role in roles)
    derived.set(f"{ROLLOUT}.colocated.exchange", "never", f"at their peaks, {peaks} fit the GPU")


def _wanted_cache(config: Config, hf_config: Mapping[str, Json]) -> int:
    """Returns the bytes of a rank's KV cache for all sequences of its engine at their greatest length; 0 if unknown.

    Ranks that are more than the KV heads hold one each.
    """
    engine, heads, model = generation_config(config).vllm_cfg, hf_config.get("num_attention_heads"), Decoder.of(hf_config)
    if not isinstance(heads, int):
        return 0
    cached = model.layers * max(model.queries // heads, model.keys // engine.layout.tp)
    size = 4 if config.policy.precision == "float32" else 2
    blocks = -(-config.policy.max_total_sequence_length // CACHE_BLOCK) + 1
    return engine.max_num_seqs * blocks * CACHE_BLOCK * 2 * cached * size


def choose_backends(config: Config, algorithm: Algorithm) -> Iterator[tuple[str, str, str]]:
    """Yields key, value and reason of `backend` and `worker` of the policy and of models next to it, where they are open.

    Raises ConfigError if both are the user's.
    """
    kinds = {"policy": "value" if gives_scores(algorithm) else "policy"}
    kinds |= {CRITIC: "value"} if algorithm.critic else {}
    kinds |= dict.fromkeys(config.models, "teacher")
    for role, kind in kinds.items():
        chosen = model_section(config, role) or config.policy
        section = role if chosen is config.policy else section_key(role)
        worker, backend = f"{section}.worker", f"{section}.backend"
        if config.is_set(worker):
            named = next((name for name, classes in WORKERS.items() if chosen.worker in classes.values()), None)
            if chosen.backend == "auto" and named is not None:
                yield backend, named, f"{worker} is its class"
            elif chosen.backend not in ("auto", named) and not _inherits(chosen.worker, chosen.backend, worker):
                raise ConfigError(
                    f"{backend} and {worker} are both set; {backend} chooses one of dagrl's own workers. Leave one out, or "
                    "name a class that inherits from the backend's"
                )
            continue
        name: str = chosen.backend
        if name == "auto":
            name, reason = _backend_for(config, section, chosen.model_name)
            yield backend, name, reason
        yield worker, WORKERS[name][kind], f"{backend} is {name}"


def _inherits(path: str, backend: str, key: str) -> bool:
    own, classes = load_class(path, key), WORKERS[backend].values()
    return any(issubclass(own, load_class(one, key)) for one in classes)


def _backend_for(config: Config, section: str, model: str | None) -> tuple[str, str]:
    """Returns the backend of a role's model, and why."""
    known = cast(tuple[str, ...], load_attribute("dagrl.workers.families.decoder:MODEL_TYPES", f"{section}.backend"))
    policy = config.policy
    if model is None and policy.model_name is None:
        kind = None if policy.random_init is None else policy.random_init.hf_config.get("model_type")
    else:
        kind = model_type(model or str(policy.model_name))
    if kind is None:
        return "megatron", "the model's type is not known yet"
    if kind in known:
        return "megatron", f"Megatron trains {kind}"
    return "fsdp", f"Megatron trains {', '.join(known)}, but model_type is {kind}"


def model_type(name: str) -> Json:
    """Returns the `model_type` of a directory or of an id on the Hub; None if it cannot be read."""
    try:
        if is_hub_id(name):
            from huggingface_hub import snapshot_download

            name = snapshot_download(name, allow_patterns="config.json")  # `hf_hub_download` retries for 23 s without a Hub
        content = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except Exception:  # `preflight` reads it again, and says what is wrong
        return None
    return content.get("model_type") if isinstance(content, dict) else None
