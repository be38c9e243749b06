"""The cases of the refit benchmark: models, pairs of layouts, and which of them fit the host's GPUs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from dagrl.bench.models import SHAPES
from dagrl.config import Config, Json
from dagrl.refit import TIED_HEAD
from dagrl.refit.slices import WeightSlice
from dagrl.runtime.layout import ParallelLayout
from dagrl.workers.fsdp.backend import FsdpBackend
from dagrl.workers.megatron.weights import megatron_weight_slices, parameter_shapes
from dagrl.workers.vllm.described import describe_ranks
from dagrl.workers.vllm.quantization import block_fp8

NAMES = {"4B": "qwen3-4b", "30B": "qwen3-30b-a3b"}

TRIAL: dict[str, Json] = {
    **SHAPES["qwen3-0.6b"].config,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
"""A model small enough to run on any machine."""


@dataclass(frozen=True)
class RefitCase:
    """One model in one pair of layouts.

    `train` and `generation` each take one GPU per rank; colocated, they share GPUs.
    """

    model: str
    train: ParallelLayout
    tp: int
    fp8: bool = False
    expert_parallel: bool = False
    colocated: bool = False
    fsdp: bool = False
    made: list[list[WeightSlice]] | None = field(default=None, compare=False, repr=False)
    """What `sources` returned before vLLM built a model: it leaves process groups, where no FSDP model can be described."""

    @property
    def name(self) -> str:
        """Name in the style of NeMo-RL's tables: `4B TP2PP2->TP4`."""
        to = "EP" if self.expert_parallel else "TP"
        where = " colocated" if self.colocated else ""
        train = f"FSDP{self.train.dp}" if self.fsdp else _sizes(self.train)
        return f"{self.model} {train}->{to}{self.tp}{where}"

    @property
    def dtype(self) -> str:
        """Data type of the generation side's linear layers."""
        return "fp8" if self.fp8 else "bf16"

    @property
    def kind(self) -> tuple[object, ...]:
        """What the first case of each kind has in common with the others; it is measured by more methods."""
        return self.model, self.fp8, self.gpus, self.ranks

    @property
    def label(self) -> str:
        """Name and data type."""
        return f"{self.name} {self.dtype}"

    def is_wanted(self, wanted: Sequence[str]) -> bool:
        """Returns whether the name and dtype start with one of `wanted`; an empty `wanted` selects all."""
        return not wanted or self.label.startswith(tuple(wanted))

    @property
    def config(self) -> Mapping[str, Json]:
        """The model's `config.json`."""
        return TRIAL if self.model == "trial" else SHAPES[NAMES[self.model]].config

    @property
    def ranks(self) -> int:
        """Ranks of both sides together."""
        return self.train.world_size + self.tp

    @property
    def gpus(self) -> int:
        """GPUs of both sides together."""
        return self.train.world_size if self.colocated else self.ranks

    @property
    def aliases(self) -> Mapping[str, str] | None:
        """The parameter that feeds a separate head if embeddings are tied."""
        return TIED_HEAD if self.config["tie_word_embeddings"] else None

    def sources(self) -> list[list[WeightSlice]]:
        """Returns the slices of each train rank."""
        return self.made or _sources(self)

    def destinations(self) -> list[list[WeightSlice]]:
        """Returns the slices of each generation rank."""
        layers = cast(int, self.config["num_hidden_layers"])
        quantized = {"hf_overrides": {"quantization_config": block_fp8(layers)}} if self.fp8 else {}
        arguments = {"dtype": "bfloat16", "enable_expert_parallel": self.expert_parallel, **quantized}
        return describe_ranks(self.config, self.tp, arguments)


@cache
def _sources(case: RefitCase) -> list[list[WeightSlice]]:
    ranks = range(case.train.world_size)
    if case.fsdp:
        sizes: dict[str, Json] = {"data_parallel_size": case.train.dp}
        policy: dict[str, Json] = {"model_name": case.model, "precision": "bfloat16", "fsdp_cfg": sizes}
        config = Config.model_validate({"name": "bench", "algorithm": "grpo", "policy": policy, "data": {}})
        return [FsdpBackend.describe(config, case.config, case.train, rank) for rank in ranks]
    return [megatron_weight_slices(case.config, case.train, rank) for rank in ranks]


def _sizes(layout: ParallelLayout) -> str:
    """Formats axes larger than one; expert parallelism replaces the data parallelism that contains it."""
    axes = [("TP", layout.tp), ("PP", layout.pp), ("EP", layout.ep), ("DP", layout.dp if layout.ep == 1 else 1)]
    return "".join(f"{axis}{size}" for axis, size in axes if size > 1) or "TP1"


def _cases() -> Iterator[RefitCase]:
    """Yields cases with sides of 1, 2 and 4 GPUs. Consecutive cases share a side where possible, so it is built once."""
    yield RefitCase("4B", ParallelLayout(), 1, colocated=True)
    yield RefitCase("4B", ParallelLayout(), 1, colocated=True, fsdp=True)
    yield RefitCase("4B", ParallelLayout(), 1, fp8=True, colocated=True)
    for half in (1, 2, 4):
        same, experts = ParallelLayout(tp=half), ParallelLayout(dp=half, ep=half)
        yield RefitCase("4B", same, half)
        yield RefitCase("4B", same, half, fp8=True)
        yield RefitCase("4B", ParallelLayout(dp=half), half, fsdp=True)
        yield RefitCase("30B", experts, half)
        yield RefitCase("30B", experts, half, fp8=True, expert_parallel=half > 2)  # FP8 blocks: 128 does not divide 768 / 4
        if half == 2:
            yield RefitCase("4B", ParallelLayout(dp=2), 2, colocated=True, fsdp=True)
            yield RefitCase("4B", same, 2, colocated=True)
            yield RefitCase("4B", ParallelLayout(pp=2), 2)
            yield RefitCase("4B", ParallelLayout(dp=2), 2)
        if half == 4:
            yield RefitCase("4B", ParallelLayout(dp=4), 2, fsdp=True)
            yield RefitCase("4B", ParallelLayout(tp=2, pp=2), 4)
            yield RefitCase("4B", ParallelLayout(tp=2, dp=2), 4)


CASES = tuple(_cases())
TRIALS = (
    RefitCase("trial", ParallelLayout(pp=2), 2),
    RefitCase("trial", ParallelLayout(tp=2), 2, fp8=True),
    RefitCase("trial", ParallelLayout(tp=2, pp=2), 4),
    RefitCase("trial", ParallelLayout(dp=2), 1, fsdp=True),
    RefitCase("trial", ParallelLayout(), 1, colocated=True),
)


def trials(wanted: Sequence[str] = ()) -> list[RefitCase]:
    """Returns the trials whose names start with one of `wanted`."""
    return [case for case in TRIALS if case.is_wanted(wanted)]


def largest_that_fit(gpus: int, memory_bytes: int, wanted: Sequence[str] = ()) -> tuple[list[RefitCase], dict[str, str]]:
    """Returns the cases that fit `gpus` GPUs of `memory_bytes` each, and the reason for each one left out.

    `wanted` selects cases by name prefix.
    """
    chosen: list[RefitCase] = []
    left_out: dict[str, str] = {}
    for case in CASES:
        label = case.label
        if not case.is_wanted(wanted):
            continue
        if case.gpus > gpus:
            left_out[label] = f"needs {case.gpus} GPUs, found {gpus}"
        elif _bytes_of_a_rank(case) > 0.93 * memory_bytes:
            left_out[label] = f"needs {_bytes_of_a_rank(case) / 1e9:.0f} GB per GPU, found {memory_bytes / 1e9:.0f}"
        else:
            chosen.append(case)
    return chosen, left_out


def _bytes_of_a_rank(case: RefitCase) -> float:
    """Returns the bytes one GPU needs: bfloat16 weights, of both sides if they share it, and 4 GB of staging and slack."""
    elements = sum(map(math.prod, parameter_shapes(case.config).values()))
    replicas = case.train.dp // case.train.ep if case.model == "4B" and not case.fsdp else 1
    sides = 2 if case.colocated else 1
    return 2 * elements * sides * replicas / min(case.train.world_size, case.tp) + 4e9
