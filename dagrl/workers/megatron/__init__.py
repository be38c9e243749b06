"""Megatron-Core workers. Importing this is cheap; Megatron itself is imported when a worker is set up.

`backend.py` has the model of these worker classes, `dagrl.workers.train` what needs no Megatron.
Where to find what:

    model      `architecture.py` reads `config.json`, `model.py` builds the layers: `attention.py`, `router.py`
               and `experts.py`, and `lora.py` for adapters
    training   `trainer.py` runs microbatches through Megatron's schedules and makes the optimizer step
    weights    `weights.py` says what each rank holds, `sharding.py` how a checkpoint has it
"""

from collections.abc import Mapping

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.workers.megatron.architecture import check_layout
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.worker import TrainWorker, ValueWorker

__all__ = ["MegatronTeacherWorker", "MegatronValueWorker", "MegatronWorker", "check_layout"]


class MegatronWorker(TrainWorker):
    """A train worker of the policy."""

    requires = ("megatron",)
    backend_class = MegatronBackend


class MegatronTeacherWorker(MegatronWorker):
    """A worker of a frozen model, such as a teacher: it gives log-probabilities under the weights of `model_name`."""

    trains = False


class MegatronValueWorker(ValueWorker):
    """A worker of a critic or a reward model: values of tokens, and steps on them."""

    requires = ("megatron",)
    backend_class = MegatronBackend

    @classmethod
    def check(cls, config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises a UserError before any actor starts if the model cannot be loaded, or not trained in this layout."""
        if config.policy.peft.enabled:
            raise ConfigError(
                "peft.enabled is true, but adapters alone would leave the fresh value head as it is; set it to false"
            )
        super().check(config, hf_config)
