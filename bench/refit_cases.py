"""What the refit benchmark measures: models, pairs of layouts, and which of them fit the GPUs that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.models import SHAPES
from dagrl.config import Json
from dagrl.layout import ParallelLayout
from dagrl.refit import TIED_HEAD
from dagrl.refit.slices import WeightSlice
from workers.families.vllm import VllmRank
from workers.megatron.weights import megatron_weight_slices
from workers.vllm.weights import vllm_weight_slices

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
"""A model small enough to try the benchmark itself, on any machine."""


@dataclass(frozen=True)
class Case:
    """One model in one pair of layouts.

    `train` and `generation` each take as many GPUs as their layout has ranks; colocated, they share them.
    """

    model: str
    train: ParallelLayout
    tp: int
    fp8: bool = False
    expert_parallel: bool = False
    to_megatron: bool = False
    colocated: bool = False

    @property
    def name(self) -> str:
        """As NeMo-RL's and other tables have it: `4B TP2PP2->TP4`."""
        to = "EP" if self.expert_parallel else "TP"
        where = " Megatron" if self.to_megatron else " colocated" if self.colocated else ""
        return f"{self.model} {_sizes(self.train)}->{to}{self.tp}{where}"

    @property
    def dtype(self) -> str:
        """Of the generation side's linear layers."""
        return "fp8" if self.fp8 else "bf16"

    def is_wanted(self, wanted: Sequence[str]) -> bool:
        """Whether its name and dtype begin as one of `wanted`, or nothing is wanted in particular."""
        return not wanted or f"{self.name} {self.dtype}".startswith(tuple(wanted))

    @property
    def config(self) -> Mapping[str, Json]:
        """The model's `config.json`."""
        return TRIAL if self.model == "trial" else SHAPES[NAMES[self.model]].config

    @property
    def ranks(self) -> int:
        """Of both sides together."""
        return self.train.world_size + self.tp

    @property
    def gpus(self) -> int:
        """Of both sides together."""
        return self.train.world_size if self.colocated else self.ranks

    @property
    def generation(self) -> ParallelLayout:
        """The other side's layout, as Megatron's where that is what it is."""
        return ParallelLayout(tp=self.tp)

    @property
    def aliases(self) -> Mapping[str, str] | None:
        """What feeds a head of its own where embeddings are tied."""
        return TIED_HEAD if self.config["tie_word_embeddings"] else None

    def sources(self) -> list[list[WeightSlice]]:
        """What each train rank holds."""
        return [megatron_weight_slices(self.config, self.train, rank) for rank in range(self.train.world_size)]

    def destinations(self) -> list[list[WeightSlice]]:
        """What each generation rank holds."""
        if self.to_megatron:
            return [megatron_weight_slices(self.config, self.generation, rank) for rank in range(self.tp)]
        return [vllm_weight_slices(self.config, self.vllm_rank(rank)) for rank in range(self.tp)]

    def vllm_rank(self, rank: int) -> VllmRank:
        """A generation rank, as the weight layout knows it."""
        return VllmRank(self.tp, rank, expert_parallel=self.expert_parallel, fp8=self.fp8)


def _sizes(layout: ParallelLayout) -> str:
    """Axes that are larger than one; expert parallelism says more than the data parallelism that it lies in."""
    axes = [("TP", layout.tp), ("PP", layout.pp), ("EP", layout.ep), ("DP", layout.dp if layout.ep == 1 else 1)]
    return "".join(f"{axis}{size}" for axis, size in axes if size > 1) or "TP1"


def _cases() -> Iterator[Case]:
    """Sides of 1, 2 and 4 GPUs; what serves two cases is built once for both where they follow each other."""
    yield Case("4B", ParallelLayout(), 1, colocated=True)
    yield Case("4B", ParallelLayout(), 1, fp8=True, colocated=True)
    for half in (1, 2, 4):
        same, experts = ParallelLayout(tp=half), ParallelLayout(dp=half, ep=half)
        yield Case("4B", same, half)
        yield Case("4B", same, half, fp8=True)
        yield Case("30B", experts, half)
        yield Case("30B", experts, half, fp8=True, expert_parallel=half > 2)  # 768 / 4 is not a multiple of 128
        if half == 2:
            yield Case("4B", ParallelLayout(pp=2), 2)
            yield Case("4B", ParallelLayout(dp=2), 2)
            yield Case("4B", ParallelLayout(pp=2), 2, to_megatron=True)
        if half == 4:
            yield Case("4B", ParallelLayout(tp=2, pp=2), 4)
            yield Case("4B", ParallelLayout(tp=2, dp=2), 4)
            yield Case("4B", ParallelLayout(tp=2, pp=2), 4, to_megatron=True)
        yield Case("4B", same, half, to_megatron=True)


CASES = tuple(_cases())
TRIALS = (
    Case("trial", ParallelLayout(pp=2), 2),
    Case("trial", ParallelLayout(tp=2), 2, fp8=True),
    Case("trial", ParallelLayout(tp=2, pp=2), 4, to_megatron=True),
    Case("trial", ParallelLayout(), 1, colocated=True),
)


def trials(wanted: Sequence[str] = ()) -> list[Case]:
    """The trials that `wanted` chooses by the beginning of their names."""
    return [case for case in TRIALS if case.is_wanted(wanted)]


def largest_that_fit(gpus: int, memory_bytes: int, wanted: Sequence[str] = ()) -> tuple[list[Case], dict[str, str]]:
    """The cases for `gpus` that each have `memory_bytes`, and why each of the others is left out.

    `wanted` chooses by the beginning of names.
    """
    chosen: list[Case] = []
    left_out: dict[str, str] = {}
    for case in CASES:
        label = f"{case.name} {case.dtype}"
        if not case.is_wanted(wanted):
            continue
        if case.gpus > gpus:
            left_out[label] = f"needs {case.gpus} GPUs, {gpus} are there"
        elif _bytes_of_a_rank(case) > 0.93 * memory_bytes:
            left_out[label] = f"needs {_bytes_of_a_rank(case) / 1e9:.0f} GB a GPU, {memory_bytes / 1e9:.0f} are there"
        else:
            chosen.append(case)
    return chosen, left_out


def _bytes_of_a_rank(case: Case) -> float:
    """Of one GPU: weights in bfloat16, of both sides where they share it, and room for staging and the largest parameter."""
    from bench.models import parameter_shapes

    elements = 0
    for shape in parameter_shapes(case.config).values():
        size = 1
        for extent in shape:
            size *= extent
        elements += size
    replicas = case.train.dp // case.train.ep if case.model == "4B" else 1
    sides = 2 if case.colocated else 1
    return 2 * elements * sides * replicas / min(case.train.world_size, case.tp) + 4e9
