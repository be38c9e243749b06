"""Models next to the policy, each on workers of its own: the critic of PPO (`critic`) and frozen ones (`models`)."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from dagrl.config.fsdp import FsdpLayoutConfig
from dagrl.config.megatron import LayoutConfig
from dagrl.config.section import PathText, Section, derived


class CriticOptimizerConfig(Section):
    """AdamW of the critic, with a constant learning rate. What has no key here is as for the policy."""

    lr: PositiveFloat = 1e-5
    """Learning rate."""


class CriticMegatronConfig(LayoutConfig):
    """The critic's Megatron workers: parallel layout and recomputation."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass. Saves memory and runs the recomputed layers twice."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks (ZeRO-1)."""


class OwnModelConfig(Section):
    """A model next to the policy, on workers in a layout of its own. Precision and microbatches are the policy's."""

    model_name: PathText | None
    backend: Literal["auto", "megatron", "fsdp"] = derived("auto", "megatron if it has the model's type, else fsdp")
    """What computes the model, as `policy.backend`. Not together with `worker`."""

    fsdp_cfg: FsdpLayoutConfig = FsdpLayoutConfig()
    colocated: bool = False
    """Place its workers on the GPUs of the train workers, next to their memory; with `policy.generation.colocated` it takes
    turns with them and generation. false: on GPUs of its own."""


class CriticConfig(OwnModelConfig):
    """The critic of algorithm `ppo`: a model with a value head, in a layout and with an optimizer of its own."""

    model_name: PathText | None = None
    """The model that it starts from: a Hugging Face directory or an id on the Hub, with the policy's tokenizer. A language
    model gets a fresh value head; a `ForSequenceClassification` model with one label keeps its own. null: the policy's
    model."""

    worker: str = derived("dagrl.workers.megatron:MegatronValueWorker", "the class of `backend`")
    """Import path of the worker's class."""

    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    megatron_cfg: CriticMegatronConfig = CriticMegatronConfig()

    value_clip: PositiveFloat | None = 0.5
    """A value costs at least as much as one within this distance of the value before the step. null: no clipping."""

    warmup_steps: NonNegativeInt = 0
    """Steps of the run in which only the critic learns."""


class FrozenModelConfig(OwnModelConfig):
    """A frozen model, such as a teacher, on workers of its own in a layout of its own. They hold weights alone: no gradients
    and no optimizer."""

    model_name: PathText
    """A Hugging Face directory or an id on the Hub, with the policy's tokenizer."""

    worker: str = derived("dagrl.workers.megatron:MegatronTeacherWorker", "the class of `backend`")
    """Import path of the worker's class."""

    megatron_cfg: LayoutConfig = LayoutConfig()
