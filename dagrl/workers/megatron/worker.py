"""Train workers on Megatron-Core: of a policy, of a critic or reward model, and of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.runtime.shapes import Batch
from dagrl.runtime.worker import in_warmup
from dagrl.workers.megatron.backend import MegatronBackend
from dagrl.workers.train.worker import TrainWorker, ValueWorker


class MegatronWorker(TrainWorker):
    """A train worker of the policy."""

    requires = ("megatron",)
    backend_class = MegatronBackend

    def calibrate_kv_scales(self, batch: Batch) -> dict[str, float]:
        """Calibrates the scales of generation's FP8 KV cache on `batch` under the current weights.

        All workers call it together; the next refit sends the scales. Returns the largest scale of keys and of values (`k`,
        `v`) over this worker's layers. A warm-up does not change the scales.
        """
        from dagrl.workers.megatron.kv_scales import without_padding

        with self.megatron().calibrating() as scales, self._running():
            with nullcontext() if in_warmup() else scales.calibrating():
                self._logprobs(without_padding(batch), "policy")
            return scales.largest()

    def merge_kv_scales(self, parts: list[dict[str, float]]) -> dict[str, float]:
        """Returns the largest scales of several workers."""
        return {kind: max(part[kind] for part in parts) for kind in parts[0]}

    def megatron(self) -> MegatronBackend:
        """Returns the backend."""
        backend = self.backend()
        assert isinstance(backend, MegatronBackend)
        return backend


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
