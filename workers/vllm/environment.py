"""What vLLM needs of its process before it is imported: the one place that knows its environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from dagrl.config import Config, GenerationConfig
from dagrl.errors import ConfigError


def vllm_environment(config: Config) -> dict[str, str]:
    """Environment variables of a generation process. What the user has set of the thread count and log level stays."""
    generation = require_generation(config)
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's steps run in this process, when we say so
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores; binding each to all of them fails with TP
        "VLLM_CPU_KVCACHE_SPACE": "",  # would override kv_cache_memory_bytes
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # vLLM indexes GPUs by the host's numbering, and Ray's graph loop looks for the actor's GPU in the same list.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    if generation.vllm_cfg.enforce_eager:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if Path(model_path(config)).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"  # nothing to look up: saves seconds of retries without a network
    return variables


def require_generation(config: Config) -> GenerationConfig:
    """The generation section; ConfigError when the configuration has none."""
    if config.policy.generation is None:
        raise ConfigError("policy.generation is missing; a generation worker needs it")
    return config.policy.generation


def model_path(config: Config) -> str:
    """The checkpoint to load; ConfigError when none is named."""
    if config.policy.model_name is None:
        raise ConfigError(
            "policy.model_name is not set: a generation worker loads a Hugging Face checkpoint. "
            "Write policy.random_init to a directory first and name that directory"
        )
    return config.policy.model_name
