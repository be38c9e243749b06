"""Tiny random checkpoints and Hugging Face's log-probabilities: the reference for vLLM worker tests."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dagrl.config import Config
from dagrl.refit.slices import WeightSlice

SIZES: dict[str, Any] = {
    "vocab_size": 100,  # not a multiple of vLLM's padding
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE_SIZES: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}


def make_checkpoint(
    directory: Path,
    model_type: str = "qwen3",
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    norms: float = 0.2,
    spread: float | Callable[[str], float] = 0.15,
    **sizes: Any,
) -> Path:
    """Saves a checkpoint with distributions far from uniform, by transformers.

    `norms`, `spread`: standard deviations of norms around 1, and of other weights, perhaps by name, around 0.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    moe = MOE_SIZES if model_type == "qwen3_moe" else {}
    config = AutoConfig.for_model(model_type, **{**SIZES, **moe, "tie_word_embeddings": tied, **sizes})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device)
            deviation = spread(name) if callable(spread) else spread
            parameter.copy_(1 + noise * norms if "norm" in name else noise * deviation)
    model.save_pretrained(directory)
    return directory


def whole_model(tensors: Mapping[str, Any]) -> list[WeightSlice]:
    """Returns every whole parameter under its own name as one end of a refit; experts as stacks."""
    stacks = Counter(re.sub(r"experts\.\d+\.", "experts.*.", name) for name in tensors)
    slices = []
    for name, count in stacks.items():
        box = tuple((0, extent) for extent in tensors[name.replace("*", "0")].shape)
        box = ((0, count), *box) if "*" in name else box
        slices.append(WeightSlice(name, box, name, box))
    return slices


def add_tokenizer(directory: Path) -> None:
    """Saves a tokenizer of words: token 4 is `t4`, and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"t{token}": token for token in range(4, SIZES["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)


def state_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def hf_logprobs(directory: Path, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Returns transformers' float32 log-probabilities `[len(tokens), vocabulary]` at each new token's position."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return torch.log_softmax(logits[len(prompt) - 1 : -1].double(), -1)


def make_config(
    model: Path, generation: Mapping[str, Any] | None = None, *, length: int = 48, peft: Mapping[str, Any] | None = None
) -> Config:
    return Config.model_validate(
        {
            "name": "test",
            "algorithm": "grpo",
            "data": {"path": "unused"},
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": length,
                "peft": peft or {},
                "generation": {"vllm_cfg": {"max_num_seqs": 8, "kv_cache_memory_bytes": 8 << 20}, **(generation or {})},
            },
        }
    )


def chosen(logprobs: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
