"""Train workers on Megatron-Core: of a policy, of a critic or reward model, and of a teacher."""

from __future__ import annotations

from collections.abc import Mapping

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.worker import TrainWorker, ValueWorker


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
