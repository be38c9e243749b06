"""Models next to the policy, each on workers of its own: the critic of PPO (`critic`) and a teacher (`teacher`)."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dagrl.config.policy import MegatronConfig, SequencePackingConfig
from dagrl.config.section import PathText, Section


class CriticConfig(Section):
    """The critic of algorithm `ppo`: a model with a value head, in a layout and with an optimizer of its own."""

    model_name: PathText | None = None
    """The model that it starts from: a Hugging Face directory or an id on the Hub, with the policy's tokenizer. A language
    model gets a fresh value head; a `ForSequenceClassification` model with one label keeps its own. null: the policy's
    model."""

    worker: str = "dagrl.workers.megatron:MegatronValueWorker"
    """Import path of the worker's class."""

    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of weights and activations. null: `policy.precision`."""

    train_global_batch_size: PositiveInt | None = None
    """Sequences of one optimizer step, over all data-parallel ranks. null: `policy.train_global_batch_size`."""

    train_micro_batch_size: PositiveInt | None = None
    """Sequences of one forward and backward pass. null: `policy.train_micro_batch_size`."""

    value_batch_size: PositiveInt | None = None
    """Sequences of one forward pass that computes values. null: `policy.logprob_batch_size`."""

    sequence_packing: SequencePackingConfig | None = None
    """Several sequences per row. null: `policy.sequence_packing`."""

    value_clip: PositiveFloat | None = 0.5
    """A value costs at least as much as one within this distance of the value before the step. null: no clipping."""

    warmup_steps: NonNegativeInt = 0
    """Steps of the run in which only the critic learns."""

    colocated: bool = False
    """Place its workers on the GPUs of the train workers, next to their memory. false: on GPUs of its own. Not with
    `policy.generation.colocated`."""

    megatron_cfg: MegatronConfig = MegatronConfig()
    """Its Megatron workers."""


class TeacherConfig(Section):
    """A reference policy on workers of its own, such as the teacher of `loss_fn.name: distill`, in a layout of its own.

    They hold weights alone: no gradients, no optimizer.
    """

    model_name: PathText
    """A Hugging Face directory or an id on the Hub, with the policy's tokenizer."""

    worker: str = "dagrl.workers.megatron:MegatronTeacherWorker"
    """Import path of the worker's class."""

    precision: Literal["float32", "bfloat16"] | None = None
    """Precision of weights and activations. null: `policy.precision`."""

    logprob_batch_size: PositiveInt | None = None
    """Sequences of one forward pass. null: `policy.logprob_batch_size`."""

    sequence_packing: SequencePackingConfig | None = None
    """Several sequences per row. null: `policy.sequence_packing`."""

    colocated: bool = False
    """Place its workers on the GPUs of the train workers, next to their memory. false: on GPUs of its own. Not with
    `policy.generation.colocated`."""

    megatron_cfg: MegatronConfig = MegatronConfig()
    """Its Megatron workers."""
