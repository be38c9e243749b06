"""The section `policy`: the model, how it trains (`megatron_cfg`, `fsdp_cfg`) and how it generates (`generation`).

Keys and defaults follow NeMo-RL where it has them.
"""

import datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.fsdp import FsdpConfig
from dagrl.config.generation import GenerationConfig
from dagrl.config.megatron import MegatronConfig
from dagrl.config.section import Json, PathText, Section, Seed, derived
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

    date: datetime.date | None = derived(None, "the day on which the run first starts, if the chat template writes a date")
    """The date that the chat template writes (`strftime_now`). A run that resumes keeps its own."""


class SequencePackingConfig(Section):
    """Microbatches of one row that holds several sequences, with attention limited to each.

    A row is padded to the next eighth of its token budget. Replaces `train_micro_batch_size` and `logprob_batch_size`.
    See `dagrl.workers.train.row_plans`.
    """

    enabled: bool = derived(False, "GPUs: true; else false")
    """Pack sequences."""

    train_mb_tokens: PositiveInt | None = derived(None, "GPUs: what fits the memory, at most 16384; less for a pipeline")
    """Tokens of a train microbatch. null: `max_total_sequence_length * train_micro_batch_size`."""

    logprob_mb_tokens: PositiveInt | None = derived(None, "GPUs: up to twice `train_mb_tokens`, if that is derived")
    """Tokens of a log-probability microbatch. null: `max_total_sequence_length * logprob_batch_size`."""

    shared_prefix: bool | Literal["auto"] = "auto"
    """Compute the tokens that neighbouring sequences begin with once per row: the prompt of a group, or of both answers of a
    preference. `auto`: where it saves at least a third of the tokens, except with context parallelism, a router loss, or
    attention that cannot.
    """


class OptimizerConfig(Section):
    """AdamW, or with backend `fsdp` any other optimizer."""

    name: str = "torch.optim:AdamW"
    """Import path of the optimizer's class. One that takes matrices alone, `torch.optim:Muon`, gets those of the layers, and
    AdamW all other weights."""

    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of the class."""

    lr: PositiveFloat = derived(1e-6, "1e-6 for GRPO, 1e-5 for SFT and LoRA")
    """Peak learning rate."""

    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay; at most `lr`."""

    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay (AdamW) of matrices; norms and biases have none."""

    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""

    adam_eps: PositiveFloat = 1e-8
    """Term added to the denominator of the update."""

    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the gradient over all parameters. 0: no clipping."""

    max_skipped_steps: PositiveInt = 20
    """Steps in a row that may change no weights, as the gradient is zero or not finite; then the run ends with an error."""


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


class PeftConfig(Section):
    """LoRA: small trained matrices next to frozen weights, `W + alpha / dim * B @ A`."""

    enabled: bool = False
    """Train adapters instead of all weights. The reference policy is then the base model, without a copy."""

    refit: Literal["merged", "adapters"] = "merged"
    """What a refit sends: all weights with the adapters added to them, or the adapters alone, into vLLM's LoRA slots."""

    target_modules: tuple[str, ...] = ()
    """Linear layers with an adapter, by Hugging Face names such as `q_proj` or `layers.0.mlp.up_proj`. Empty: all."""

    target_parameters: tuple[str, ...] = ()
    """Weights of experts with adapters, one for each expert, by the ends of their names in transformers, such as
    `experts.gate_up_proj`. FSDP workers have them. Empty: none."""

    dim: PositiveInt = 8
    """Rank of the adapters."""

    alpha: PositiveFloat = 32.0
    """Numerator of the scale, `alpha / dim`."""

    adapter_path: PathText | None = None
    """Directory with adapters in PEFT's format to start from. null: A is random and B is zero."""


class PolicyConfig(Section):
    """The model, how it trains and how it generates."""

    model_name: PathText | None = None
    """A directory with a Hugging Face checkpoint, or the id of one on the Hub, such as `Qwen/Qwen3-0.6B`. null:
    `random_init`."""

    random_init: RandomInit | None = None
    """A randomly initialized model. null: use `model_name`."""

    tokenizer: TokenizerConfig = TokenizerConfig()

    backend: Literal["auto", "megatron", "fsdp"] = derived("auto", "megatron if it has the model's type, else fsdp")
    """What trains the model: Megatron-Core, in the layout of `megatron_cfg`, or transformers' own model under FSDP2, in the
    layout of `fsdp_cfg`. `auto`: Megatron for the model types that it has. Not together with `worker`."""

    worker: str = derived(
        "dagrl.workers.megatron:MegatronWorker", "the class of `backend` for a policy, or for a reward model"
    )
    """Import path of the train worker's class."""

    worker_args: dict[str, Json] = Field(default_factory=dict)
    """Settings of a `worker` of your own, for it to read."""

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

    deterministic: bool = False
    """Kernels whose results depend neither on which sequences run together nor on timing: vLLM's batch-invariant ones (on
    GPUs of compute capability 9.0 or more; those on CPUs are) and torch's deterministic ones in the train workers.
    Generation and training still round differently."""

    router_replay: bool = False
    """Train a mixture of experts with the experts that generation chose for each token (rollout routing replay), which
    brings both sides' log-probabilities closer."""

    reference_weights: Literal["host", "device"] = "host"
    """Where the reference policy's weights are. `host`: pinned memory, swapped in when used. `device`: a second copy on the
    GPU, not available with `generation.colocated`."""

    max_total_sequence_length: PositiveInt = derived(
        512, "the longest example, or the longest prompt and `max_new_tokens`; at most what the model has room for"
    )
    """Longest sequence in tokens, prompt and completion together."""

    sequence_buckets: tuple[PositiveInt, ...] = ()
    """Padded widths in tokens that phases are warmed up at. Empty: `max_total_sequence_length` alone."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    peft: PeftConfig = PeftConfig()
    megatron_cfg: MegatronConfig = MegatronConfig()
    fsdp_cfg: FsdpConfig = FsdpConfig()

    generation: GenerationConfig | None = None
    """Generation. null: with algorithm `grpo`, all defaults."""

    @property
    def train_layout(self) -> ParallelLayout:
        """The train group's parallel layout: that of `fsdp_cfg` for backend `fsdp`, else of `megatron_cfg`."""
        return self.fsdp_cfg.layout if self.backend == "fsdp" else self.megatron_cfg.layout

    def microbatch_tokens(self, purpose: Literal["train", "logprob"]) -> int:
        """Returns the token budget of a packed microbatch."""
        section = self.sequence_packing
        rows = self.train_micro_batch_size if purpose == "train" else self.logprob_batch_size
        tokens = section.train_mb_tokens if purpose == "train" else section.logprob_mb_tokens
        return tokens or self.max_total_sequence_length * rows
