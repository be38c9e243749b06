"""Models next to the policy, each on workers of its own: the critic of PPO (`critic`) and a teacher (`teacher`)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.megatron import MegatronConfig, OptimizerConfig
from dagrl.config.policy import SequencePackingConfig
from dagrl.config.section import PathText, Section


class OwnOptimizerConfig(OptimizerConfig):
    """AdamW, as Megatron implements it."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""


class OwnMegatronConfig(MegatronConfig):
    """Megatron workers of a model next to the policy. No key is derived."""

    data_parallel_size: PositiveInt = 1
    """Number of replicas of the model."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and runs the recomputed layers twice."""

    optimizer: OwnOptimizerConfig = OwnOptimizerConfig()


class OwnPackingConfig(SequencePackingConfig):
    """Microbatches of one row that holds several sequences, with attention limited to each. No key is derived."""

    enabled: bool = True
    """Pack sequences."""

    train_mb_tokens: PositiveInt | None = None
    """Tokens of a train microbatch. null: `max_total_sequence_length` times the sequences of a microbatch."""

    logprob_mb_tokens: PositiveInt | None = None
    """Tokens of a microbatch of a forward pass. null: `max_total_sequence_length` times its sequences."""


class OwnModelConfig(Section):
    """A model next to the policy, on workers in a layout of its own."""

    model_name: PathText | None
    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of weights and activations. null: `policy.precision`."""

    sequence_packing: OwnPackingConfig | None = None
    """Several sequences per row. null: `policy.sequence_packing`."""

    colocated: bool = False
    """Place its workers on the GPUs of the train workers, next to their memory; with `policy.generation.colocated` it takes
    turns with them and generation. false: on GPUs of its own."""

    megatron_cfg: OwnMegatronConfig = OwnMegatronConfig()


class CriticConfig(OwnModelConfig):
    """The critic of algorithm `ppo`: a model with a value head, in a layout and with an optimizer of its own."""

    model_name: PathText | None = None
    """The model that it starts from: a Hugging Face directory or an id on the Hub, with the policy's tokenizer. A language
    model gets a fresh value head; a `ForSequenceClassification` model with one label keeps its own. null: the policy's
    model."""

    worker: str = "dagrl.workers.megatron:MegatronValueWorker"
    """Import path of the worker's class."""

    train_global_batch_size: PositiveInt | None = None
    """Sequences of one optimizer step, over all data-parallel ranks. null: `policy.train_global_batch_size`."""

    train_micro_batch_size: PositiveInt | None = None
    """Sequences of one forward and backward pass. null: `policy.train_micro_batch_size`."""

    value_batch_size: PositiveInt | None = None
    """Sequences of one forward pass that computes values. null: `policy.logprob_batch_size`."""

    value_clip: PositiveFloat | None = 0.5
    """A value costs at least as much as one within this distance of the value before the step. null: no clipping."""

    warmup_steps: NonNegativeInt = 0
    """Steps of the run in which only the critic learns."""


class TeacherConfig(OwnModelConfig):
    """A reference policy on workers of its own, such as the teacher of `loss_fn.name: distill`, in a layout of its own.

    They hold weights alone: no gradients, no optimizer.
    """

    model_name: PathText
    """A Hugging Face directory or an id on the Hub, with the policy's tokenizer."""

    worker: str = "dagrl.workers.megatron:MegatronTeacherWorker"
    """Import path of the worker's class."""

    logprob_batch_size: PositiveInt | None = None
    """Sequences of one forward pass. null: `policy.logprob_batch_size`."""
