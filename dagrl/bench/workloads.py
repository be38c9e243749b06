"""What benchmarks of whole steps run: tasks with prompts and rows of fixed lengths, and the configuration of a GRPO run.

Completions have one length, weights are random, and rewards differ within every group, so a step's work depends on nothing
that is learned.
"""

import io
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dagrl.bench.models import SHAPES, ModelShape
from dagrl.config.generation import ForcedLengths
from dagrl.data import Example, Splits
from dagrl.data.examples import Message
from dagrl.data.media import IMAGE, Medium, id_of
from dagrl.errors import ConfigError
from dagrl.machine import gpus

MODELS = {"0.6b": "qwen3-0.6b", "1.7b": "qwen3-1.7b", "4b": "qwen3-4b", "vl-2b": "qwen3-vl-2b", "vl-8b": "qwen3-vl-8b"}
MICROBATCH = {"0.6b": 16, "1.7b": 8, "4b": 4, "vl-2b": 8, "vl-8b": 4}
"""Sequences of a microbatch in GRPO, with which each side fits on a GPU of 141 GB."""

SLOTS = 512
"""Most sequences that an engine runs at once: as many as dagrl derives on GPUs, and vLLM's largest CUDA graph has."""

GROUP = 8  # completions of one prompt
SEED = 0  # of a run, as the configuration has it by default
PROMPT = 120  # tokens of a prompt without an image
PICTURE_PROMPT = 832  # most tokens of a prompt with an image: 768 of the image, 48 of the question, and the template's
BLOCK = 16  # tokens of a block of vLLM's KV cache
PACKED = 1024  # fewest tokens of a packed row for each sequence of the other side's microbatches, which are padded


def prompts(count: int = 256, characters: int = 128, seed: int = 0) -> Splits:
    """Returns `count` prompts of random digits."""
    texts = enumerate(_texts(count, characters, seed))
    examples = tuple(Example(text, "0", source=f"prompt {number}") for number, text in texts)
    return Splits(examples[:1], examples, examples[:1])


PICTURES = ((448, 448), (640, 480), (800, 600), (1024, 768))  # widths and heights of images, in turn
WORDS = "one two three four red green blue black".split()  # words of questions about them, one token each


def pictures(count: int = 256, words: int = 48, shrink: int = 1, seed: int = 0) -> Splits:
    """Returns `count` questions about images of smooth noise, JPEG files, whose sizes are divided by `shrink`."""
    import numpy as np
    from PIL import Image

    generator, examples = np.random.default_rng(seed), []
    for number in range(count):
        width, height = (side // shrink for side in PICTURES[number % len(PICTURES)])
        noise = Image.fromarray(generator.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
        file = io.BytesIO()
        noise.resize((width, height)).save(file, "JPEG", quality=90)
        medium = Medium(file.getvalue(), id_of(file.getvalue()), (height, width))
        question = {"type": "text", "text": " ".join(generator.choice(WORDS, words))}
        messages = Message("user", (IMAGE, question), media=(medium,)), Message("assistant", "one")
        examples.append(Example("", "one", messages, source=f"question {number}"))
    return Splits(tuple(examples[:1]), tuple(examples), tuple(examples[:1]))


def rows(count: int = 16, length: int = 2048, seed: int = 0) -> Splits:
    """Returns `count` demonstrations of `length` tokens: a digit as the prompt, and a response with its end token."""
    texts = enumerate(_texts(count, length - 1, seed))
    examples = tuple(Example(text[:1], text[1:], source=f"row {number}") for number, text in texts)
    return Splits(examples, examples, examples[:1])


def _texts(count: int, characters: int, seed: int) -> list[str]:
    generator = random.Random(seed)  # noqa: S311  # not cryptography
    return ["".join(generator.choices("0123456789", k=characters)) for _ in range(count)]


def alternating(prompts: list[str], completions: list[str], references: list[str]) -> list[float]:
    """Returns 0 and 1 in turn, so half of a group is better than the other half."""
    return [float(number % 2) for number in range(len(prompts))]


@dataclass(frozen=True)
class RolloutCase:
    """The rollouts of a step: `prompt` and `completion` in tokens, `micro` in sequences, the KV cache of an engine.

    With a `median`, completions have other lengths: log-normal with sigma 1, at most `completion`.
    """

    name: str
    model: str
    sequences: int
    prompt: int
    completion: int
    micro: int
    tiny: bool
    kv_bytes: int = 0
    median: int | None = None

    @property
    def lengths(self) -> ForcedLengths:
        """The distribution of the lengths of completions."""
        return ForcedLengths(median=self.median or self.completion, sigma=1.0 if self.median else 0.0)

    @property
    def shape(self) -> ModelShape:
        """The model's shape; narrow with `tiny`."""
        shape = SHAPES[MODELS[self.model]]
        return shape.narrowed() if self.tiny else shape

    @property
    def task(self) -> tuple[str, dict[str, int]]:
        """The function of the prompts, and its arguments."""
        count = 16 * self.sequences // GROUP
        if self.shape.images:
            return "pictures", {"count": count, "shrink": 8 if self.tiny else 1}
        return "prompts", {"count": count, "characters": self.prompt}

    @property
    def slots(self) -> int:
        """Sequences that an engine runs at once."""
        return min(self.sequences, SLOTS)

    @property
    def precision(self) -> str:
        """The dtype of the weights that compute."""
        return "float32" if self.tiny else "bfloat16"


def rollout_case(
    name: str,
    model: str,
    sequences: str,
    completion: int,
    *,
    micro: int | None,
    tiny: bool,
    kv_share: float,
    prompt: int = PROMPT,
    median: int | None = None,
) -> RolloutCase:
    """Returns a case whose KV cache holds all sequences, within a share of the GPU's memory. Raises ConfigError."""
    if model not in MODELS or not sequences.isdecimal() or int(sequences) < 1 or int(sequences) % GROUP:
        raise ConfigError(
            f"case {name!r}: expected a model of {', '.join(MODELS)} and a number of sequences, in whole groups of {GROUP}"
        )
    count = int(sequences)
    prompt = PICTURE_PROMPT if SHAPES[MODELS[model]].images else prompt
    case = RolloutCase(name, model, count, prompt, completion, min(micro or MICROBATCH[model], count), tiny, median=median)
    return replace(case, kv_bytes=_kv_cache_bytes(case, kv_share))


def _kv_cache_bytes(case: RolloutCase, share: float) -> int:
    """Returns the KV cache that holds all sequences, with prompts shared in groups."""
    config = {name: int(str(case.shape.text[name])) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")}
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    blocks = case.sequences * (-(-case.completion // BLOCK) + 1) + case.sequences // GROUP * -(-case.prompt // BLOCK)
    memory = min((gpu.memory_mib << 20 for gpu in gpus()), default=0) or 8 << 30
    return min((blocks + BLOCK) * BLOCK * per_token * (4 if case.tiny else 2), int(memory * share))


def grpo_config(case: RolloutCase, model: Path, engine: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the configuration of a colocated GRPO run: one optimizer step per batch, completions of equal length.

    `engine` has further keys of `vllm_cfg`.
    """
    tokens = case.prompt + case.completion + 8
    packed = max(PACKED, tokens) * case.micro
    vllm = {"max_num_seqs": case.slots, "enforce_eager": case.tiny, "max_model_len": tokens, **(engine or {})}
    # The share has no effect with a given cache, but this much must be free.
    vllm |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": case.kv_bytes}
    return {
        "name": "bench",
        "algorithm": "grpo",
        "policy": {
            "model_name": str(model),
            "precision": case.precision,
            "train_global_batch_size": case.sequences,
            "train_micro_batch_size": case.micro,
            "max_total_sequence_length": tokens,
            "sequence_packing": {"enabled": True, "train_mb_tokens": packed, "logprob_mb_tokens": 2 * packed},
            "generation": {
                "max_new_tokens": case.completion,
                "forced_lengths": case.lengths.model_dump(),
                "colocated": {"enabled": True},
                "vllm_cfg": vllm,
            },
        },
        "sft": {"max_num_steps": 0},
        "grpo": {
            "num_prompts_per_step": case.sequences // GROUP,
            "num_generations_per_prompt": GROUP,
            "val_period": 0,
            "val_at_start": False,
        },
        "loss_fn": {"reference_policy_kl_penalty": 0.0, "force_on_policy_ratio": True},
        "data": {"task": f"dagrl.bench.workloads:{case.task[0]}", "task_args": case.task[1], "shuffle": False},
        "reward": {"function": "dagrl.bench.workloads:alternating"},
    }
