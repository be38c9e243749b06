"""The section `policy`: the model, how it trains (`megatron_cfg`) and how it generates (`generation`).

Keys and defaults follow NeMo-RL where it has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.section import Json, PathText, Section, Seed, derived
from dagrl.errors import LayoutError
from dagrl.runtime.layout import ParallelLayout


class RandomInit(Section):
    """A model initialized from a seed instead of a checkpoint.

    Written to `<run>/init_model` as a checkpoint before any worker starts.
    """

    hf_config: dict[str, Json]
    """Content of a Hugging Face `config.json`. `vocab_size` is the tokenizer's unless a larger one is given."""

    seed: Seed = 0
    """Seed of the weights."""

    tokenizer_characters: str | None = None
    """Build a character tokenizer of these characters. null: load `policy.tokenizer.name`."""


def _jinja(text: str) -> str:
    if "{" not in text:
        raise ValueError("Jinja text with messages in {{ }}; paste the template itself, not the name of its file")
    return text


class TokenizerConfig(Section):
    """The tokenizer and its chat template."""

    name: PathText | None = None
    """Directory of the tokenizer, or an id on the Hugging Face Hub. null: the model's."""

    chat_template: Annotated[str, AfterValidator(_jinja)] | None = None
    """Chat template as Jinja text. null: the tokenizer's own."""


class OptimizerConfig(Section):
    """AdamW, as Megatron implements it."""

    lr: PositiveFloat = derived(1e-6, "1e-6 for GRPO, 1e-5 for SFT and LoRA")
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay; at most `lr`."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Term added to the denominator of the update."""

    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the gradient over all parameters. 0: no clipping."""

    use_distributed_optimizer: bool = derived(False, "true if `data_parallel_size` is derived and above 1, else false")
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""


class SchedulerConfig(Section):
    """The learning-rate schedule, counted in optimizer steps.

    There is one optimizer step for every `policy.train_global_batch_size` samples, so a GRPO step may have several.
    """

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from `optimizer.lr` to `optimizer.min_lr`."""

    lr_warmup_iters: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""

    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up; at most `optimizer.lr`."""

    lr_decay_iters: PositiveInt | None = None
    """Optimizer steps until the decay ends. null: all optimizer steps of the run."""


class DistributedDataParallelConfig(Section):
    """Megatron's data-parallel wrapper."""

    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32. false: in `policy.precision`."""

    overlap_grad_reduce: bool = False
    """Reduce each bucket of gradients while the backward pass computes the next one."""

    overlap_param_gather: bool = False
    """Gather sharded parameters while the next forward pass runs.

    Needs `overlap_grad_reduce` and `optimizer.use_distributed_optimizer`. Not for models with experts.
    """


class PeftConfig(Section):
    """LoRA: small trained matrices next to frozen weights, `W + alpha / dim * B @ A`."""

    enabled: bool = False
    """Train adapters instead of all weights. The reference policy is then the base model, without a copy."""

    refit: Literal["merged", "adapters"] = "merged"
    """What a refit sends: all weights with the adapters added to them, or the adapters alone, into vLLM's LoRA slots."""

    target_modules: tuple[str, ...] = ()
    """Linear layers with an adapter, by Hugging Face names such as `q_proj` or `layers.0.mlp.up_proj`. Empty: all."""

    dim: PositiveInt = 8
    """Rank of the adapters."""

    alpha: PositiveFloat = 32.0
    """Numerator of the scale."""

    use_rslora: bool = False
    """Divide `alpha` by the square root of `dim` instead of `dim` (rsLoRA)."""

    use_dora: bool = False
    """Also train the norm of each row of the adapted weights (DoRA)."""

    adapter_path: PathText | None = None
    """Directory with adapters in PEFT's format to start from. null: A is random and B is zero."""


class MegatronConfig(Section):
    """Megatron train workers: parallel layout, recomputation, optimizer."""

    data_parallel_size: PositiveInt = derived(1, "the GPUs of this machine if no layout is set, else 1")
    """Replicas of the model, each trained on its share of the batch."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks over which each layer's weights are split."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline stages."""

    virtual_pipeline_model_parallel_size: PositiveInt = 1
    """Model chunks of each pipeline stage, for the interleaved schedule."""

    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first pipeline stage. null: as many as the middle stages."""

    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last pipeline stage. null: as many as the middle stages."""

    context_parallel_size: PositiveInt = 1
    """Ranks over which each sequence is split."""

    expert_model_parallel_size: PositiveInt = 1
    """Ranks over which the experts of a mixture-of-experts layer are distributed."""

    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks over which each expert's weights are split. null: `tensor_model_parallel_size`."""

    sequence_parallel: bool = False
    """Split activations outside attention and MLP over the tensor-parallel ranks, along the sequence."""

    tp_comm_overlap: bool = False
    """Must be false: Megatron's user-buffer overlap needs Transformer Engine's layers.

    The Megatron layers in use always overlap the reduction of input gradients with the weight gradients.
    """

    activation_checkpointing: bool = derived(False, "true if a sequence does not fit the GPU without, else false")
    """Recompute activations in the backward pass. Saves memory and runs the recomputed layers twice."""

    recompute_granularity: Literal["full", "selective"] = "full"
    """What `activation_checkpointing` recomputes: whole layers, or the attention core alone."""

    recompute_method: Literal["uniform", "block"] = "uniform"
    """For granularity `full`: recompute all layers (`uniform`) or the first ones of each pipeline stage (`block`)."""

    recompute_num_layers: PositiveInt = 1
    """`uniform`: layers per saved input. `block`: layers per pipeline stage that are recomputed."""

    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    """The load-balancing loss of a mixture of experts. It compares each expert's probability with its share of the tokens
    of the microbatch (`aux_loss`), of the sequence (`seq_aux_loss`), or of the step so far on all shards
    (`global_aux_loss`)."""

    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of each layer."""

    moe_z_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the z loss of each layer, which keeps the router's logits small."""

    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """By how much each optimizer step moves the bias of each expert: up if it had fewer tokens than the mean, down if it had
    more. For models whose router has a bias (GLM-4.5). 0: the biases stay as they are."""

    cuda_graphs: bool = False
    """Replay a microbatch's forward and backward pass as CUDA graphs. For dense models without pipeline parallelism."""

    peft: PeftConfig = PeftConfig()
    """LoRA."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""

    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""

    distributed_data_parallel_config: DistributedDataParallelConfig = DistributedDataParallelConfig()
    """Megatron's data-parallel wrapper."""

    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a GPU, the denominator of the MFU. null: looked up by the GPU's name, for bfloat16."""

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


class SpeculativeConfig(Section):
    """Speculative decoding: a drafter proposes tokens, and one step of the policy verifies them by rejection sampling.

    Samples follow the policy's distribution for any drafter, and have the policy's log-probabilities and version.
    """

    method: Literal["ngram", "eagle", "eagle3"] | None = None
    """The drafter. `ngram`: continues as the sequence did after the same last tokens. `eagle`, `eagle3`: a small model on
    the policy's hidden states, which refits leave as it is, so fewer of its tokens are accepted as the policy changes.
    null: none."""

    num_speculative_tokens: PositiveInt = 4
    """Tokens that are proposed for a step."""

    prompt_lookup_min: PositiveInt = 2
    """`ngram`: fewest last tokens that must have occurred before."""

    prompt_lookup_max: PositiveInt = 5
    """`ngram`: most last tokens that are looked for."""

    model: PathText | None = None
    """`eagle`, `eagle3`: the drafter's checkpoint."""


class VllmConfig(Section):
    """vLLM generation workers: parallel layout, precision, memory."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks of one engine."""

    expert_parallel_size: PositiveInt = 1
    """1, or `tensor_parallel_size`: then each rank of an engine holds whole experts."""

    data_parallel_size: PositiveInt = derived(1, "the GPUs of this machine if no layout is set, else 1")
    """Number of engines."""

    max_model_len: PositiveInt | None = None
    """Longest sequence of an engine, in tokens. null: `policy.max_total_sequence_length`."""

    precision: Literal["float32", "bfloat16", "fp8"] | None = None
    """Precision of the weights. `fp8`: quantized in blocks of 128x128. null: `policy.precision`."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`auto`: the engine's dtype. `fp8`: train workers calibrate the scales, and each refit sends them."""

    max_num_seqs: PositiveInt = derived(64, "GPUs: an engine's share of a batch, at most 512; else 64")
    """Sequences that an engine decodes at once."""

    max_num_batched_tokens: PositiveInt | None = None
    """Tokens of one engine step. null: vLLM's default."""

    enforce_eager: bool = derived(True, "GPUs: false; else true")
    """Run the model without torch.compile and CUDA graphs."""

    async_scheduling: bool | None = None
    """Prepare the next engine step while the current one computes. null: where vLLM can, with `tensor_parallel_size` 1."""

    num_scheduler_steps: PositiveInt | None = None
    """Decode steps for each run of vLLM's scheduler, while every request decodes. A sequence may compute that many tokens
    less one after its end. Always 1 with `stop_strings`, an agent or `policy.router_replay`. null: 16 on GPUs, else 1."""

    speculative: SpeculativeConfig = SpeculativeConfig()
    """Speculative decoding."""

    enable_prefix_caching: bool = True
    """Share the KV cache of common prefixes, such as the prompt of a GRPO group."""

    gpu_memory_utilization: float = derived(0.6, "0.6 if colocated, else 0.85", gt=0, lt=1)
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

    between_prompts: float = Field(default=0.5, ge=0, le=1)
    """Share of the variance that all requests of a prompt have in common."""


class ColocatedConfig(Section):
    """Train and generation workers on the same GPUs, taking turns: one side frees its memory while the other works."""

    enabled: bool = derived(False, "true on a machine with GPUs if no layout is set and both roles may take turns")
    """Place both groups on the same GPUs."""

    train_share: float = Field(default=0.5, gt=0, lt=1)
    """Fraction of a GPU that Ray accounts to the train worker, together with a critic and a teacher there; the generation
    worker gets the rest."""

    exchange: Literal["auto", "always", "never"] = "auto"
    """What leaves the GPU while the other role works. auto: only what does not fit, by the memory that is free during
    warm-up. always: everything. never: nothing, and a run ends if memory is too small."""

    sleep_level: Literal[1, 2] = derived(2, "1 if refits send adapters alone, else 2")
    """Where generation's weights are while it sleeps during training. 1: in host memory. 2: dropped, and sent again by the
    refit."""


class GenerationConfig(Section):
    """How completions are generated."""

    worker: str = "dagrl.workers.vllm:VllmWorker"
    """Import path of the generation worker's class."""

    max_new_tokens: PositiveInt = derived(64, "half of `policy.max_total_sequence_length` if that is set, else 1024")
    """Longest completion, in tokens."""

    temperature: NonNegativeFloat = 1.0
    """Sampling temperature. 0: greedy."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens that together have this probability."""

    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many most likely tokens. null, 0 or -1: from all."""

    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to those of the tokenizer, config.json and generation_config.json."""

    quantum_engine_steps: PositiveInt | None = None
    """Engine steps of one `generate` replay. null: chosen by `quantum_seconds` and the measured replay overhead."""

    quantum_seconds: PositiveFloat = 0.5
    """Longest time that a weight update waits for running quanta. Unused if `quantum_engine_steps` is set."""

    request_order: Literal["longest_first", "fifo"] = "longest_first"
    """Order of new requests. `longest_first` sorts by the lengths of past completions of the same prompt."""

    forced_lengths: ForcedLengths | None = None
    """Fixed completion lengths, for benchmarks. null: completions end where the model ends them."""

    colocated: ColocatedConfig = ColocatedConfig()
    """Train and generation workers on the same GPUs."""

    vllm_cfg: VllmConfig = VllmConfig()
    """The vLLM engines."""

    vllm_kwargs: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, by name."""


class SequencePackingConfig(Section):
    """Microbatches of one row that holds several sequences, with attention limited to each.

    A row is padded to the next eighth of its token budget. Replaces `train_micro_batch_size` and `logprob_batch_size`.
    See `dagrl.workers.megatron.packing`.
    """

    enabled: bool = derived(False, "GPUs: true unless `dynamic_batching` is on; else false")
    """Pack sequences."""

    train_mb_tokens: PositiveInt | None = derived(None, "GPUs: what fits the memory, at most 16384")
    """Tokens of a train microbatch. null: `max_total_sequence_length * train_micro_batch_size`."""

    logprob_mb_tokens: PositiveInt | None = derived(None, "GPUs: twice `train_mb_tokens`, if that is derived")
    """Tokens of a log-probability microbatch. null: `max_total_sequence_length * logprob_batch_size`."""

    algorithm: Literal["modified_first_fit_decreasing", "first_fit_decreasing", "first_fit_shuffle", "concatenative"] = (
        "modified_first_fit_decreasing"
    )
    """Bin-packing algorithm."""


class DynamicBatchingConfig(Section):
    """Microbatches with as many rows as fit a token budget. Rows of similar length share one, padded to the longest."""

    enabled: bool = False
    """Batch by tokens."""

    train_mb_tokens: PositiveInt | None = None
    """Tokens of a train microbatch. null: `max_total_sequence_length * train_micro_batch_size`."""

    logprob_mb_tokens: PositiveInt | None = None
    """Tokens of a log-probability microbatch. null: `max_total_sequence_length * logprob_batch_size`."""

    sequence_length_round: PositiveInt = 64
    """Rows are padded to a multiple of this many tokens."""


class PolicyConfig(Section):
    """The model, how it trains and how it generates."""

    model_name: PathText | None = None
    """A directory with a Hugging Face checkpoint, or the id of one on the Hub, such as `Qwen/Qwen3-0.6B`. null:
    `random_init`."""

    random_init: RandomInit | None = None
    """A randomly initialized model. null: use `model_name`."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""

    worker: str = derived(
        "dagrl.workers.megatron:MegatronWorker", "reward models: dagrl.workers.megatron:MegatronValueWorker"
    )
    """Import path of the train worker's class."""

    precision: Literal["float32", "bfloat16"] = derived("float32", "GPUs: bfloat16; else float32")
    """Precision of the model's weights and activations."""

    train_global_batch_size: PositiveInt = derived(64, "GRPO: the samples of a step; SFT and preferences: 32")
    """Sequences of one optimizer step, over all data-parallel ranks; pairs of sequences for preferences."""

    train_micro_batch_size: PositiveInt = 8
    """Sequences of one forward and backward pass."""

    logprob_batch_size: PositiveInt = 16
    """Sequences of one forward pass that computes log-probabilities."""

    offload_optimizer_for_logprob: bool = False
    """Move optimizer state to host memory while log-probabilities are computed."""

    logprob_chunk_size: PositiveInt | None = None
    """Tokens whose logits exist at once. null: as many as make 128 Mi logits, and on a GPU with enough free memory the
    exponentials of a microbatch's logits are kept in half precision for the backward pass."""

    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    """Several sequences per row."""

    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    """Microbatches by token count."""

    deterministic: bool = False
    """Kernels whose results depend neither on which sequences run together nor on timing: vLLM's batch-invariant ones (on
    GPUs of compute capability 9.0 or more; those on CPUs are) and torch's deterministic ones in the train workers.
    Generation and training still round differently."""

    router_replay: bool = False
    """Train a mixture of experts with the experts that generation chose for each token (rollout routing replay), which
    brings both sides' log-probabilities closer."""

    reference_model_name: PathText | None = None
    """The reference policy: a Hugging Face directory or the id of a model on the Hub, such as the teacher of
    `loss_fn.name: distill`. It has the policy's tokenizer and fits its layout, but may have another size or family. null:
    the policy at the start of GRPO."""

    reference_weights: Literal["host", "device"] = "host"
    """Where the reference policy's weights are. `host`: pinned memory, swapped in when used. `device`: a second copy on the
    GPU, not available with `generation.colocated`."""

    max_total_sequence_length: PositiveInt = derived(
        512, "the longest example, or the longest prompt and `max_new_tokens`; at most what the model has room for"
    )
    """Longest sequence in tokens, prompt and completion together."""

    sequence_buckets: tuple[PositiveInt, ...] = ()
    """Padded widths in tokens that phases are warmed up at. Empty: `max_total_sequence_length` alone."""

    megatron_cfg: MegatronConfig = MegatronConfig()
    """The Megatron train workers."""

    generation: GenerationConfig | None = None
    """Generation. null: with algorithm `grpo`, all defaults."""

    def microbatch_tokens(self, purpose: Literal["train", "logprob"]) -> int:
        """Returns the token budget of a microbatch with sequence packing or dynamic batching."""
        section = self.sequence_packing if self.sequence_packing.enabled else self.dynamic_batching
        rows = self.train_micro_batch_size if purpose == "train" else self.logprob_batch_size
        tokens = section.train_mb_tokens if purpose == "train" else section.logprob_mb_tokens
        return tokens or self.max_total_sequence_length * rows
