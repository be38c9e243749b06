"""MegatronValueWorker: one rank of a critic or a reward model, which gives a value for each token.

It is a `MegatronWorker` whose model has a scalar head (`dagrl.workers.megatron.model.ScalarHeadModel`) in place of the
vocabulary's: same layouts, microbatches, optimizer and checkpoints. It starts from a language model with a fresh head, or
from a checkpoint that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dagrl.config import Config, Json
from dagrl.errors import ConfigError
from dagrl.runtime.shapes import Batch
from dagrl.workers.families.hf_config import with_scalar_head
from dagrl.workers.megatron.worker import MegatronWorker, sums_of


class MegatronValueWorker(MegatronWorker):
    """A worker of a critic or a reward model: values of tokens, and steps on them."""

    @staticmethod
    def model_config(hf_config: Mapping[str, Json]) -> Mapping[str, Json]:
        """Returns the configuration of the model with a scalar head."""
        return with_scalar_head(hf_config)

    @staticmethod
    def check(config: Config, hf_config: Mapping[str, Json]) -> None:
        """Raises a UserError before any actor starts if the model cannot be loaded, or not trained in this layout."""
        if config.policy.megatron_cfg.peft.enabled:
            raise ConfigError(
                "megatron_cfg.peft.enabled is true, but adapters alone would leave the fresh value head as it is; "
                "set it to false"
            )
        MegatronWorker.check(config, with_scalar_head(hf_config))

    def values(self, batch: Batch) -> Batch | None:
        """Returns `values` [rows, tokens] float32: at each token that of the state before it; 0 at entry 0 and in padding.

        Given by one worker of the shard (last stage, tp 0, cp 0); None on the others.
        """
        from dagrl.workers.megatron.forward_backward import run_columns

        trainer = self._ready("weights")
        with self._running():
            for microbatches in self._microbatches(batch, "logprob"):
                columns = run_columns(trainer.chunks, trainer.model_pass, microbatches, lambda _, values: (values,))
        return self._given(batch, columns, "values")

    def answer_sums(self, batch: Batch, model: Literal["policy", "reference"] = "policy") -> Batch | None:
        """Returns `sums` [rows] float64: of the values of each row's tokens in `loss_mask`, for a reward model one."""
        found = self.values(batch)
        return None if found is None else sums_of(batch, found["values"])
