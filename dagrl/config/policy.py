"""The configuration's section `policy`: the model, how it is trained (`megatron_cfg`) and how it generates (`generation`).

Keys and defaults follow NeMo-RL where it has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.section import Json, PathText, Section, Seed
from dagrl.errors import LayoutError
from dagrl.layout import ParallelLayout


class RandomInit(Section):
    """A model made from a seed instead of a checkpoint: `hf_config` is the content of a Hugging Face `config.json`.

    `vocab_size` is the tokenizer's unless a larger one is given. The checkpoint is written to `<run>/init_model` before any
    worker starts.
    """

    hf_config: dict[str, Json]
    seed: Seed = 0
    tokenizer_characters: str | None = None  # build a character tokenizer of these; None: use policy.tokenizer.name


def _jinja(text: str) -> str:
    if "{" not in text:
        raise ValueError("Jinja text, with messages in {{ }}; write the text of a file here, and not its name")
    return text


class TokenizerConfig(Section):
    name: PathText | None = None  # a directory; None: the model's
    chat_template: Annotated[str, AfterValidator(_jinja)] | None = None  # Jinja text; None: the tokenizer's own


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    use_distributed_optimizer: bool = False


class SchedulerConfig(Section):
    """Counted in optimizer steps: one for each `policy.train_global_batch_size` samples, so a GRPO step may have several."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: NonNegativeInt = 0
    lr_warmup_init: NonNegativeFloat = 0.0  # optimizer.lr at most
    lr_decay_iters: PositiveInt | None = None  # None: all optimizer steps of the run


class DistributedDataParallelConfig(Section):
    grad_reduce_in_fp32: bool = True  # off: gradients are kept and reduced in the policy's precision


class MegatronConfig(Section):
    data_parallel_size: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt = 1
    num_layers_in_first_pipeline_stage: PositiveInt | None = None  # None: as many as the stages between
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None
    sequence_parallel: bool = False
    activation_checkpointing: bool = False  # recompute activations on the way back: less memory, each layer run twice
    recompute_granularity: Literal["full", "selective"] = "full"  # whole layers, or the attention core alone
    recompute_method: Literal["uniform", "block"] = "uniform"  # full: all layers, or the first of each pipeline stage
    recompute_num_layers: PositiveInt = 1  # uniform: layers between two kept inputs; block: layers of a stage
    cuda_graphs: bool = False  # replay a microbatch's passes through the model as CUDA graphs; for dense models without pp
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    peak_tflops: PositiveFloat | None = None  # what a GPU can do at most, for the MFU; None: by its name, in bfloat16

    @property
    def layout(self) -> ParallelLayout:
        """The train group's parallel layout."""
        return ParallelLayout(
            dp=self.data_parallel_size,
            pp=self.pipeline_model_parallel_size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
        )


class VllmConfig(Section):
    tensor_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1  # 1, or tensor_parallel_size: every rank of an engine then holds whole experts
    data_parallel_size: PositiveInt = 1
    max_model_len: PositiveInt | None = None  # None: policy.max_total_sequence_length
    precision: Literal["float32", "bfloat16", "fp8"] | None = None  # None: policy.precision; fp8: 128x128 blocks of weights
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"  # fp8: scales are calibrated on the train workers, refits carry them
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt | None = None
    enforce_eager: bool = True
    async_scheduling: bool | None = None  # prepare a step while another computes; None: GPUs, TP 1
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = Field(default=0.6, gt=0, lt=1)
    kv_cache_memory_bytes: PositiveInt | None = 64 << 20  # None: from gpu_memory_utilization

    @property
    def layout(self) -> ParallelLayout:
        """The generation group's parallel layout. Raises LayoutError for experts over a part of an engine's ranks."""
        ep, tp = self.expert_parallel_size, self.tensor_parallel_size
        if ep not in (1, tp):
            raise LayoutError(
                f"expert_parallel_size is {ep}; an engine spreads experts over all its {tp} ranks, or over none"
            )
        return ParallelLayout(dp=self.data_parallel_size, tp=tp, ep=ep, etp=1 if ep > 1 else None)


class ForcedLengths(Section):
    """For measurements: completions of lengths drawn from a log-normal distribution, whatever the model says.

    The end of a sequence is ignored, and each request stops at its own length, which its prompt and its seed decide.
    """

    median: PositiveFloat
    sigma: NonNegativeFloat = 1.0  # of the logarithm
    between_prompts: float = Field(default=0.5, ge=0, le=1)  # share of the variance that all requests of a prompt have alike


class ColocatedConfig(Section):
    """Train and generation workers on the same GPUs, in turn: one holds the memory while the other waits without it."""

    enabled: bool = False
    train_share: float = Field(default=0.5, gt=0, lt=1)  # of a GPU in Ray's books, the rest is generation's
    sleep_level: Literal[1, 2] = 2  # what becomes of generation's weights while training: 1 host memory, 2 dropped


class GenerationConfig(Section):
    worker: str = "workers.vllm:VllmWorker"
    max_new_tokens: PositiveInt = 64
    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # None, 0 or -1: all tokens
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the tokenizer's, config.json's, generation_config.json's
    quantum_engine_steps: PositiveInt | None = None  # engine steps in one replay of `generate`; None: what its overhead asks
    quantum_seconds: PositiveFloat = 0.5  # what an update waits for quanta at most, where their engine steps are not given
    request_order: Literal["longest_first", "fifo"] = "longest_first"  # by the past lengths of their prompts
    forced_lengths: ForcedLengths | None = None
    colocated: ColocatedConfig = ColocatedConfig()
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: dict[str, Json] = Field(default_factory=dict)  # more of vLLM's EngineArgs, by name


class SequencePackingConfig(Section):
    """Microbatches of one row, in which sequences lie side by side and attention stays inside each; see `dagrl.packing`.

    A row is padded to the next eighth of the budget. Takes the place of `train_micro_batch_size` and `logprob_batch_size`.
    """

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = None  # None: max_total_sequence_length * train_micro_batch_size
    logprob_mb_tokens: PositiveInt | None = None  # None: max_total_sequence_length * logprob_batch_size
    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"] = (
        "modified_first_fit_decreasing"
    )


class DynamicBatchingConfig(Section):
    """Microbatches of as many rows as fit a budget of tokens: rows of like length together, padded to the longest."""

    enabled: bool = False
    train_mb_tokens: PositiveInt | None = None  # None: as for sequence packing
    logprob_mb_tokens: PositiveInt | None = None
    sequence_length_round: PositiveInt = 64  # rows are padded to multiples of this


class PolicyConfig(Section):
    model_name: PathText | None = None  # a Hugging Face checkpoint directory; None: random_init
    random_init: RandomInit | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    worker: str = "workers.megatron:MegatronWorker"
    precision: Literal["float32", "bfloat16"] = "float32"
    train_global_batch_size: PositiveInt = 64  # sequences of one optimizer step
    train_micro_batch_size: PositiveInt = 8
    logprob_batch_size: PositiveInt = 16  # sequences of one log-probability microbatch
    offload_optimizer_for_logprob: bool = False  # optimizer state lies in host memory while log-probabilities are computed
    logprob_chunk_size: PositiveInt | None = None  # tokens whose logits exist at a time; None: 128 Mi logits
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    # Pinned memory, swapped in; or a second copy on the GPU, which colocated generation cannot have.
    reference_weights: Literal["host", "device"] = "host"
    max_total_sequence_length: PositiveInt = 512
    sequence_buckets: tuple[PositiveInt, ...] = ()  # token widths to warm up; empty: max_total_sequence_length alone
    megatron_cfg: MegatronConfig = MegatronConfig()
    generation: GenerationConfig | None = None

    def microbatch_tokens(self, purpose: Literal["train", "logprob"]) -> int:
        """The budget of a microbatch with sequence packing or dynamic batching."""
        section = self.sequence_packing if self.sequence_packing.enabled else self.dynamic_batching
        rows = self.train_micro_batch_size if purpose == "train" else self.logprob_batch_size
        tokens = section.train_mb_tokens if purpose == "train" else section.logprob_mb_tokens
        return tokens or self.max_total_sequence_length * rows
