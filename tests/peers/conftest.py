"""Tests with real verl and TRL, in an environment of its own (`make test-peers`). Elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagrl.config import ClusterConfig
from dagrl.run.cluster import ray_cluster

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]

# verl's FSDP engine on the CPU: see cpu_platform.py. verl reads these when it is imported.
CPU_PLATFORM = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.peers.cpu_platform",
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
}
os.environ.update(CPU_PLATFORM)


@pytest.fixture(scope="session")
def verl_cluster() -> Iterator[None]:
    """A local Ray cluster with the resources that verl's pools ask for: ten CPUs per worker."""
    root = str(Path(__file__).parents[2])
    environment = CPU_PLATFORM | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with ray_cluster(ClusterConfig(num_cpus=200), environment):
        yield


VOCABULARY = 512


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 with random weights and a tokenizer of one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")  # noqa: S106
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)
