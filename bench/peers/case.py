"""What both sides of `bench peers` are told: the kind of step, the model and the sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dagrl.bench.models import SHAPES, ModelShape
from dagrl.errors import ConfigError

MODELS = {"0.6b": "qwen3-0.6b", "4b": "qwen3-4b"}
GROUP = 8
"""Completions of one prompt."""

_CASE = re.compile(r"(?P<kind>grpo|sft|generate) (?P<model>\S+) (?P<sequences>\d+)")


@dataclass(frozen=True)
class PeerCase:
    """One comparison. `prompt`, `completion` and `length` are in tokens; `micro` is in sequences, `kv_bytes` per engine."""

    kind: str
    model: str
    sequences: int
    prompt: int
    completion: int
    length: int
    micro: int
    kv_bytes: int
    tiny: bool

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
    def precision(self) -> str:
        """The dtype of the weights that compute."""
        return "float32" if self.tiny else "bfloat16"


@dataclass(frozen=True)
class SideOrder:
    """What a side's process is started with."""

    case: PeerCase
    model: Path  # a Hugging Face checkpoint, with its tokenizer
    variant: str = ""  # of the peer, such as "packed"


def parse_case(text: str, *, prompt: int, completion: int, length: int, micro: int, kv_gib: float, tiny: bool) -> PeerCase:
    """Returns the case named `text`. Raises ConfigError if it is malformed, unknown or not a whole number of groups."""
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
    return PeerCase(
        match["kind"],
        match["model"],
        sequences,
        prompt,
        completion,
        length,
        min(micro, sequences),
        int(kv_gib * (1 << 30)),
        tiny,
    )
