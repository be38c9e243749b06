"""What both sides of `bench peers` are told: the kind of step, the model and the sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dagrl.bench.models import SHAPES, ModelShape
from dagrl.errors import ConfigError
from dagrl.machine import gpus

MODELS = {"0.6b": "qwen3-0.6b", "4b": "qwen3-4b"}
MICROBATCH = {"0.6b": 16, "4b": 4}
"""Sequences of a microbatch in GRPO, with which each side fits on a GPU of 141 GB."""

SLOTS = 512
"""Most sequences that an engine runs at once: as many as dagrl derives on GPUs, and vLLM's largest CUDA graph has."""

GROUP = 8
"""Completions of one prompt."""

BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""

KV_SHARE = {("grpo", True): 0.15, ("grpo", False): 0.4, ("generate", True): 0.25, ("generate", False): 0.8}
"""Largest share of the GPU's memory for the KV cache of one engine, by kind and whether all sides are there."""

_CASE = re.compile(r"(?P<kind>grpo|sft|generate) (?P<model>\S+) (?P<sequences>\d+)")


@dataclass(frozen=True)
class PeerCase:
    """One comparison. `prompt`, `completion` and `length` are in tokens; `micro` is in sequences.

    `kv_bytes`: the KV cache of each engine. `together`: all sides are on the GPU at the same time.
    """

    kind: str
    model: str
    sequences: int
    prompt: int
    completion: int
    length: int
    micro: int
    kv_bytes: int
    tiny: bool
    together: bool = True

    @property
    def name(self) -> str:
        """The name that `--cases` takes, with sizes that are not the default ones."""
        return f"{self.kind} {self.model} {self.sequences}"

    @property
    def shape(self) -> ModelShape:
        """The model's shape; narrow with `tiny`."""
        shape = SHAPES[MODELS[self.model]]
        return shape.narrowed() if self.tiny else shape

    @property
    def tokens(self) -> int:
        """Completion tokens of a step; for `sft` all tokens."""
        return self.sequences * (self.length if self.kind == "sft" else self.completion)

    @property
    def slots(self) -> int:
        """Sequences that an engine runs at once."""
        return min(self.sequences, SLOTS)

    @property
    def precision(self) -> str:
        """The dtype of the weights that compute."""
        return "float32" if self.tiny else "bfloat16"


@dataclass(frozen=True)
class SideOrder:
    """What a side's process is started with. Its turns are of any of the `cases`, which have one kind and model."""

    cases: tuple[PeerCase, ...]
    model: Path  # a Hugging Face checkpoint, with its tokenizer
    variant: str = ""  # of the peer, such as "packed"

    @property
    def largest(self) -> PeerCase:
        """The case with the most sequences, for which engines are built."""
        return max(self.cases, key=lambda case: case.sequences)


def parse_case(text: str, kv_gib: float | None, micro: int | None, **sizes: Any) -> PeerCase:
    """Returns the case named `text`. Without `kv_gib`, engines have room for all sequences, if the GPU has for two engines.
    Without `micro`, microbatches are `MICROBATCH`.

    Raises ConfigError if the case is malformed, unknown or not a whole number of groups.
    """
    match = _CASE.fullmatch(text)
    if match is None or match["model"] not in MODELS:
        raise ConfigError(
            f"case {text!r}: expected KIND MODEL SEQUENCES, such as 'grpo 0.6b 128', with a kind of grpo, sft, generate and "
            f"a model of {', '.join(MODELS)}"
        )
    sequences = int(match["sequences"])
    if match["kind"] != "sft" and sequences % GROUP:
        raise ConfigError(f"case {text!r}: {sequences} sequences are no whole number of groups of {GROUP}; use a multiple")
    if sequences < 1:
        raise ConfigError(f"case {text!r}: expected at least one sequence")
    micro = min(micro or MICROBATCH[match["model"]], sequences)
    case = PeerCase(match["kind"], match["model"], sequences, kv_bytes=0, micro=micro, **sizes)
    return replace(case, kv_bytes=kv_cache_bytes(case) if kv_gib is None else int(kv_gib * (1 << 30)))


def kv_cache_bytes(case: PeerCase) -> int:
    """Returns the KV cache that holds all sequences, with prompts shared in groups; at most a share of the GPU's memory."""
    config = {name: int(str(case.shape.config[name])) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")}
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    blocks = case.sequences * (-(-case.completion // BLOCK) + 1) + case.sequences // GROUP * -(-case.prompt // BLOCK)
    wanted = (blocks + BLOCK) * BLOCK * per_token * (4 if case.tiny else 2)
    memory = min((gpu.memory_mib << 20 for gpu in gpus()), default=0) or 8 << 30
    return min(wanted, int(memory * KV_SHARE.get((case.kind, case.together), 0.0)))
