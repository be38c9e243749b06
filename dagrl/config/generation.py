"""The section `policy.generation`: sampling, quanta, colocation and the vLLM engines."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator

from dagrl.config.section import Json, Section, derived
from dagrl.errors import LayoutError
from dagrl.runtime.layout import ParallelLayout

MIN_TEMPERATURE = 0.01
"""vLLM raises temperatures between 0 and this (`_MAX_TEMP` in its sampling_params.py) to avoid NaN and infinity."""


class VllmConfig(Section):
    """vLLM generation workers: parallel layout, precision, memory."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks of one engine."""

    expert_parallel_size: PositiveInt = 1
    """1, or `tensor_parallel_size`: then each rank of an engine holds whole experts."""

    data_parallel_size: PositiveInt = derived(1, "the GPUs of this machine that divide a batch, if no layout is set, else 1")
    """Number of engines."""

    max_model_len: PositiveInt | None = None
    """Longest sequence of an engine, in tokens. null: `policy.max_total_sequence_length`."""

    precision: Literal["float32", "bfloat16", "fp8"] | None = None
    """Precision of the weights. `fp8`: quantized in blocks of 128x128. null: `policy.precision`."""

    max_num_seqs: PositiveInt = derived(64, "GPUs: an engine's share of a batch, at most 512; else 64")
    """Sequences that an engine decodes at once."""

    enforce_eager: bool = derived(True, "GPUs: false; else true")
    """Run the model without torch.compile and CUDA graphs."""

    num_scheduler_steps: PositiveInt | None = None
    """Decode steps for each run of vLLM's scheduler, while every request decodes. A sequence may compute that many tokens
    less one after its end. Always 1 with `stop_strings`, an agent or `policy.router_replay`. null: 16 on GPUs, else 1."""

    gpu_memory_utilization: float = derived(0.6, "0.6 if colocated, else 0.85 x gpus_per_worker", gt=0, lt=1)
    """Share of the GPU's memory for vLLM. Used when `kv_cache_memory_bytes` is null."""

    kv_cache_memory_bytes: PositiveInt | None = derived(
        64 << 20,
        "what `max_num_seqs` sequences need: on colocated GPUs if it fits, without GPUs at most an eighth of the memory; "
        "else null",
    )
    """Bytes of the KV cache of one rank. null: what `gpu_memory_utilization` leaves."""

    @property
    def layout(self) -> ParallelLayout:
        """The generation group's parallel layout.

        Raises LayoutError if `expert_parallel_size` is neither 1 nor `tensor_parallel_size`.
        """
        ep, tp = self.expert_parallel_size, self.tensor_parallel_size
        if ep not in (1, tp):
            raise LayoutError(f"expert_parallel_size is {ep}; expected: 1, or tensor_parallel_size ({tp})")
        return ParallelLayout(dp=self.data_parallel_size, tp=tp, ep=ep, etp=1 if ep > 1 else None)


class ForcedLengths(Section):
    """Completions of fixed lengths, for benchmarks: drawn from a log-normal distribution, whatever the model generates.

    The end-of-sequence token is ignored. A request's prompt and seed decide its length.
    """

    median: PositiveFloat
    """Median length in tokens."""

    sigma: NonNegativeFloat = 1.0
    """Standard deviation of the length's logarithm."""


class ColocatedConfig(Section):
    """Train and generation workers on the same GPUs, taking turns: one side frees its memory while the other works."""

    enabled: bool = derived(False, "true on a machine with GPUs if no layout is set and both roles may take turns")
    """Place both groups on the same GPUs."""

    exchange: Literal["auto", "always", "never"] = derived(
        "auto", "never if the predicted peaks of both roles fit the GPUs (`dagrl inspect --memory`); else auto"
    )
    """What leaves the GPU while the other role works. auto: only what does not fit, by the memory that is free during
    warm-up. always: everything. never: nothing, and a run ends if memory is too small."""

    start_together: bool = derived(False, "true if both roles' memory at their start is known and fits the GPUs")
    """Start generation next to a train state that is on the GPU, not after that has moved to the host. Needs
    `vllm_cfg.kv_cache_memory_bytes`, as free memory cannot be measured meanwhile. With `exchange: never` it is so anyway."""


class GenerationConfig(Section):
    """How completions are generated."""

    worker: str = "dagrl.workers.vllm:VllmWorker"
    """Import path of the generation worker's class."""

    max_new_tokens: PositiveInt = derived(64, "half of `policy.max_total_sequence_length` if that is set, else 1024")
    """Longest completion, in tokens."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature, at least 0.01. `dagrl evaluate` measures greedy completions, too."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens that together have this probability."""

    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many most likely tokens. null, 0 or -1: from all."""

    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion."""

    stop_token_ids: tuple[int, ...] = derived(
        (),
        "what ends turns of the chat template, and the end tokens of the tokenizer, config.json and generation_config.json",
    )
    """Token ids that end a completion. Those that are derived are added to yours."""

    quantum_engine_steps: PositiveInt | None = None
    """Engine steps of one `generate` replay. null: chosen by the measured replay overhead, so that a weight update waits
    for running quanta for at most half a second."""

    forced_lengths: ForcedLengths | None = None
    """Fixed completion lengths, for benchmarks. null: completions end where the model ends them."""

    colocated: ColocatedConfig = ColocatedConfig()
    vllm_cfg: VllmConfig = VllmConfig()

    vllm_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, by name; not those that workers set."""

    @field_validator("temperature")
    @classmethod
    def _temperature_that_vllm_keeps(cls, value: float) -> float:
        if value == 0:
            raise ValueError(
                f"{MIN_TEMPERATURE:g} or more, as all completions of a prompt are equal at 0, so that none is better than "
                "another. `dagrl evaluate` measures greedy completions"
            )
        if value < MIN_TEMPERATURE:
            raise ValueError(
                f"{MIN_TEMPERATURE:g} or more: vLLM raises what is below to {MIN_TEMPERATURE:g}, and log-probabilities of "
                "train workers would not match"
            )
        return value
