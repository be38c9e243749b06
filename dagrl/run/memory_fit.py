"""Derives what depends on memory: microbatches, KV caches, and whether colocated roles start together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from dagrl.config import Config, Json, PolicyConfig, VllmConfig
from dagrl.config.settings import generation_config, generation_dtype
from dagrl.errors import ConfigError
from dagrl.machine import gpus, host_memory
from dagrl.run.open_keys import ENGINE, MEGATRON, ROLLOUT, Derived

CACHE_BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""

ENGINE_ROOM = 6 << 30
"""Bytes of a GPU that an engine needs in addition to weights and KV cache: activations, logits of a step, CUDA graphs."""

START_SHARE = 0.8
"""Largest part of a GPU that colocated roles are planned to take when they start together."""

LEAST_CACHE = 1 << 30
"""Bytes of the smallest derived KV cache of a GPU."""

MOST_TOKENS = 16384
"""Tokens of a microbatch that keep a GPU busy; more would only take memory."""

ROUND = 64
"""Lengths from data are rounded up to a multiple of this many tokens."""


def fit_microbatches(derived: Derived, hf_config: Mapping[str, Json], weight_bytes: int) -> None:
    """Sets the tokens of a microbatch to what fits half of the memory that weights, gradients and optimizer leave."""
    config, packing = derived.config, "policy.sequence_packing"
    keys = (f"{packing}.train_mb_tokens", "policy.train_micro_batch_size", f"{MEGATRON}.activation_checkpointing")
    memory = _gpu_bytes()
    if not (config.policy.sequence_packing.enabled and derived.open(*keys) and memory and weight_bytes):
        return
    megatron, width = config.policy.megatron_cfg, config.policy.max_total_sequence_length
    parameters, shards = _parameters(hf_config, weight_bytes), megatron.layout.tp * megatron.layout.pp
    room = 0.5 * (0.9 * memory - _state_bytes(config.policy, parameters))
    fitting = int(room / _activation_bytes(hf_config) * shards) // ROUND * ROUND
    tokens = max(width, min(MOST_TOKENS, fitting))
    reason = f"half of the {max(0.0, 2 * room) / 2**30:.0f} GiB that {parameters / 1e9:.2g} B parameters leave of a GPU"
    if fitting < width:
        derived.set(f"{MEGATRON}.activation_checkpointing", True, f"the activations of {width} tokens exceed {reason}")
        reason = "one sequence of the greatest length"
    derived.set(f"{packing}.train_mb_tokens", tokens, reason)
    derived.set(f"{packing}.logprob_mb_tokens", 2 * tokens, "twice those of training: no activations are kept")


def _gpu_bytes() -> int:
    """Returns the memory of the smallest GPU here; 0 without one."""
    return min((gpu.memory_mib << 20 for gpu in gpus()), default=0)


def _parameters(hf_config: Mapping[str, Json], weight_bytes: int) -> float:
    return weight_bytes / (4 if hf_config.get("torch_dtype", hf_config.get("dtype")) == "float32" else 2)


def _state_bytes(policy: PolicyConfig, parameters: float) -> float:
    """Returns the bytes of the weights, gradients and optimizer state of a rank."""
    megatron = policy.megatron_cfg
    sharded = megatron.layout.dp if megatron.use_distributed_optimizer else 1
    if policy.peft.enabled:
        each = 2.0 + 2  # bfloat16 weights, and merged ones until the backward pass; adapters are small
    else:
        each = 2 + 4 + 12 / sharded  # bfloat16 weights; float32 gradients; master weights and Adam
    return parameters / (megatron.layout.tp * megatron.layout.pp) * each


def _activation_bytes(hf_config: Mapping[str, Json]) -> float:
    """Returns the bytes that a token's activations take in bfloat16, with flash attention and a gated MLP, over all layers.

    Counted as in Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1: inputs of each product, norm and activation.
    """
    hidden, layers = number(hf_config, "hidden_size", 4096), number(hf_config, "num_hidden_layers", 32)
    experts = number(hf_config, "num_experts_per_tok", 1)
    wide = number(hf_config, "moe_intermediate_size", 0) * experts or number(hf_config, "intermediate_size", 4 * hidden)
    heads = number(hf_config, "num_attention_heads", 32)
    attention = heads * number(hf_config, "head_dim", hidden // heads)
    return layers * (20 * hidden + 14 * attention + 8 * wide)


def fit_host_cache(derived: Derived, hf_config: Mapping[str, Json]) -> None:
    """Sets the KV cache on a machine without GPUs: for all sequences at once, at most an eighth of the memory."""
    key, needed = f"{ENGINE}.kv_cache_memory_bytes", _wanted_cache(derived.config, hf_config)
    if not needed or not derived.open(f"{ROLLOUT}.worker", key):
        return
    most = host_memory() // (8 * generation_config(derived.config).vllm_cfg.layout.world_size)
    least = cast(int, VllmConfig.model_fields["kv_cache_memory_bytes"].default)
    reason = "all sequences at once" if needed <= most else "an eighth of the memory of this machine"
    derived.set(key, max(least, min(needed, most)), reason)


def fit_shared_cache(derived: Derived, hf_config: Mapping[str, Json], weight_bytes: int) -> None:
    """Sets the KV cache of engines that share GPUs with training to what all sequences need at once, if there is room.

    More would not make generation faster, and would leave less that can stay on the GPU in turns of training.
    """
    key, needed = f"{ENGINE}.kv_cache_memory_bytes", _wanted_cache(derived.config, hf_config)
    if not needed or "kv_lora_rank" in hf_config or not derived.open(f"{ROLLOUT}.worker", key):
        return
    engine = generation_config(derived.config).vllm_cfg
    memory = _gpu_bytes()
    most = engine.gpu_memory_utilization * memory - weight_bytes / engine.layout.tp - ENGINE_ROOM
    if needed <= most:
        derived.set(key, max(LEAST_CACHE, needed), "GPUs: all sequences at once")


def start_together(derived: Derived, hf_config: Mapping[str, Json], weight_bytes: int) -> None:
    """Starts engines while training has its memory, if that is known to fit. Raises ConfigError if it cannot be known."""
    config, rollout = derived.config, generation_config(derived.config)
    key, cache = f"{ROLLOUT}.colocated.start_together", rollout.vllm_cfg.kv_cache_memory_bytes
    if rollout.colocated.start_together and cache is None:
        raise ConfigError(
            f"{key} is true, but {ENGINE}.kv_cache_memory_bytes is null: vLLM would take what is free, which changes while "
            "training starts. Set the bytes of the cache, or start_together=false"
        )
    ours = derived.open("policy.worker", f"{ROLLOUT}.worker") and not (derived.algorithm.critic or config.teacher)
    if cache is None or not (ours and weight_bytes and config.policy.precision == "bfloat16"):
        return
    memory = _gpu_bytes()
    training = _state_bytes(config.policy, _parameters(hf_config, weight_bytes))
    generation = _engine_bytes(config, hf_config, weight_bytes)
    if training + generation <= START_SHARE * memory:
        reason = f"{training / 2**30:.0f} GiB of training and {generation / 2**30:.0f} GiB of generation fit the GPU"
        derived.set(key, True, reason)


def _engine_bytes(config: Config, hf_config: Mapping[str, Json], weight_bytes: int) -> float:
    """Returns the bytes of a GPU that an engine with a given KV cache is planned to take."""
    engine = generation_config(config).vllm_cfg
    assert engine.kv_cache_memory_bytes is not None
    width = 4 if generation_dtype(config) == "float32" else 2
    return width * _parameters(hf_config, weight_bytes) / engine.layout.tp + engine.kv_cache_memory_bytes + ENGINE_ROOM


def _wanted_cache(config: Config, hf_config: Mapping[str, Json]) -> int:
    """Returns the bytes of a rank's KV cache for all sequences of its engine at their greatest length; 0 if unknown.

    Ranks that are more than the KV heads hold one each.
    """
    engine, heads = generation_config(config).vllm_cfg, number(hf_config, "num_attention_heads", 0)
    if not heads:
        return 0
    head_dim = number(hf_config, "head_dim", number(hf_config, "hidden_size", 0) // heads)
    kv_heads = max(1, number(hf_config, "num_key_value_heads", heads) // engine.layout.tp)
    cached = number(hf_config, "num_hidden_layers", 0) * kv_heads * head_dim
    size = 1 if engine.kv_cache_dtype == "fp8" else 4 if config.policy.precision == "float32" else 2
    blocks = -(-config.policy.max_total_sequence_length // CACHE_BLOCK) + 1
    return engine.max_num_seqs * blocks * CACHE_BLOCK * 2 * cached * size


def number(hf_config: Mapping[str, Json], key: str, otherwise: int) -> int:
    """Returns a size of the model."""
    value = hf_config.get(key)
    return value if isinstance(value, int) else otherwise
