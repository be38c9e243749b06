"""The process environment that vLLM needs before it is imported. All of its environment variables are set here."""

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from dagrl.channels.spec import nccl_environment
from dagrl.config import Config, GenerationConfig, Json
from dagrl.config.settings import generation_config
from dagrl.errors import ConfigError, LayoutError
from dagrl.machine import VISIBLE, gpu_count
from dagrl.run.cluster import gpus_per_worker
from dagrl.run.model import language_keys
from dagrl.runtime.layout import ParallelLayout

OWN_ARGUMENTS = frozenset(
    (
        *("additional_config", "cpu_distributed_timeout_seconds", "disable_custom_all_reduce", "disable_log_stats"),
        *("distributed_executor_backend", "distributed_timeout_seconds", "dtype", "enable_expert_parallel"),
        *("enable_lora", "enable_sleep_mode", "enforce_eager", "gpu_memory_utilization", "hf_overrides"),
        *("kv_cache_memory_bytes", "limit_mm_per_prompt", "load_format", "logprobs_mode", "lora_target_modules"),
        *("max_lora_rank", "max_loras", "max_model_len", "max_num_seqs", "mm_processor_cache_gb", "model", "seed"),
        *("skip_tokenizer_init", "speculative_config", "tensor_parallel_size", "tokenizer"),
    )
)
"""The fields of vLLM's EngineArgs that `dagrl.workers.vllm.launch` sets."""


def vllm_environment(config: Config) -> dict[str, str]:
    """Returns environment variables of a generation process. Keeps the user's thread count and log level."""
    generation = require_generation(config)
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine steps run in this process, on request
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores; binding each to all of them fails with TP
        "VLLM_CPU_KVCACHE_SPACE": "",  # would override kv_cache_memory_bytes
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # vLLM indexes GPUs by the host's numbering, and Ray's graph loop looks for the actor's GPU in the same list.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        **nccl_environment(),
    }
    if config.policy.deterministic:
        # Attention on CPUs splits a sequence over threads by what else is in the batch.
        variables |= {"VLLM_BATCH_INVARIANT": "1"} if gpus_per_worker(config.cluster) else {"OMP_NUM_THREADS": "1"}
    if generation.vllm_cfg.enforce_eager:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if Path(model_path(config)).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"  # nothing to look up: saves seconds of retries without a network
    return variables


def require_generation(config: Config) -> GenerationConfig:
    """Returns the generation section. Raises ConfigError if it is missing, or sets engine arguments that the worker sets."""
    generation = generation_config(config)
    if reserved := sorted(OWN_ARGUMENTS & generation.vllm_kwargs.keys()):
        raise ConfigError(
            f"policy.generation.vllm_kwargs sets {', '.join(reserved)}, which the worker sets itself; use the keys of "
            "policy.generation.vllm_cfg if they exist, or remove them"
        )
    return generation


def check_layout(hf_config: Mapping[str, Json], layout: ParallelLayout) -> None:
    """Raises LayoutError for sizes that vLLM cannot divide among the tensor-parallel ranks."""
    tp, heads, keys = layout.tp, hf_config.get("num_attention_heads"), hf_config.get("num_key_value_heads")
    if isinstance(heads, int) and heads % tp:
        raise LayoutError(f"the model's {heads} attention heads are not divisible by tensor_parallel_size {tp}")
    if isinstance(keys, int) and keys % tp and tp % max(keys, 1):
        raise LayoutError(f"tensor_parallel_size {tp} does not divide the model's {keys} key/value heads, nor they it")


CPU_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256})
"""Head sizes of vLLM's CPU attention in every version that dagrl supports (vllm/v1/attention/backends/cpu_attn.py)."""


def check_head_size(config: Config, hf_config: Mapping[str, Json]) -> None:
    """Raises ConfigError if generation workers run on CPUs and vLLM's attention there lacks the size of the model's heads.

    On GPUs it takes any size. MLA (`kv_lora_rank`) has an attention of its own, whose size is not that of the heads.
    """
    from transformers import CONFIG_MAPPING

    keys, cluster = language_keys(hf_config), config.cluster
    if cluster.address is not None or gpus_per_worker(cluster) or keys.get("model_type") not in list(CONFIG_MAPPING):
        return
    kind = CONFIG_MAPPING[keys["model_type"]]
    names = (
        kind.attribute_map.get(name, name) for name in ("head_dim", "hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    size, hidden, heads, latent = (keys.get(name, getattr(kind, name, None)) for name in names)
    if not isinstance(size, int):
        size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    if size is None or size in CPU_HEAD_SIZES or latent:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # takes seconds

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"the model's attention heads have a size of {size} (head_dim), which vLLM's attention on CPUs lacks; it has "
            f"{', '.join(map(str, known))}. Choose a model with one of these, or run on GPUs"
        )


def model_path(config: Config) -> str:
    """Returns the checkpoint to load. Raises ConfigError if none is configured."""
    if config.policy.model_name is None:
        raise ConfigError(
            "policy.model_name is not set: a generation worker loads a Hugging Face checkpoint. "
            "Write policy.random_init to a directory first, then set policy.model_name to it"
        )
    return config.policy.model_name


def show_host_gpus(environment: MutableMapping[str, str] | None = None) -> None:
    """Makes all GPUs of the host visible to this process. Call it before CUDA starts.

    Ray leaves the variable unset here (see `vllm_environment`), but its graph loop looks there for the actor's GPU.
    """
    environment = os.environ if environment is None else environment
    if not environment.get(VISIBLE) and gpu_count():
        environment[VISIBLE] = ",".join(str(index) for index in range(gpu_count()))
